"""CUDA without a GPU: stand-ins of the libraries that torch's CUDA build loads, in seconds from C.

torch's dispatcher, allocator, streams, events, graphs and NCCL backend are its own and run; kernels do nothing. So
tests see errors of the host, wrong devices and types, waits, launches, memory and, by torch's CUDA sanitizer, accesses
of two streams that nothing orders. They see no numbers and no times.
"""
