"""Uses a trained generator: opens a run or an exported file, and makes images."""
