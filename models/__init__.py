"""Model adapters. Installed as the import package `dbo_models`."""
