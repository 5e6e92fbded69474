"""Images: read from files, in the form that networks see, and as bytes again."""
