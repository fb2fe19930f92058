"""The arithmetic behind the costs of published cases. Each module writes its files anew when it is run.

Cost files name these modules by their former paths, `tools/derive_..._cases.py`: that text is part of their digests.
"""
