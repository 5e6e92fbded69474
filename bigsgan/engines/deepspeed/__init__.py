"""What bigsgan changes in DeepSpeed, or knows of its private parts."""
