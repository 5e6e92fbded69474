"""What a run would hold in memory, predicted from its recipe alone."""
