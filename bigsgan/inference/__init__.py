"""What a trained generator is used for: opening a run or an exported file, and the images that it makes."""
