"""The commands of `bigsgan`: one file each, which adds its options and checks them before torch is imported."""
