"""Weights that other programs trained: their names and files, read without their code."""
