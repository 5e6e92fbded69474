"""What others' public code computes, as files in tests/data: programs that write them, and what reads them."""
