"""The commands of `bigsgan`: one file each, which adds options and checks them before it imports torch."""
