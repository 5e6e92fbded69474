"""Everything that changes DeepSpeed, or depends on its private parts."""
