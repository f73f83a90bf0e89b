"""Varlen attention kernels: a table of specs, one file each, and how one is chosen."""
