"""Images: read from files, as a network knows them, and as bytes again."""
