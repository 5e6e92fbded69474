"""This process, its machine and the others of the job: ranks, devices, memory, files, locks, signals, launchers."""
