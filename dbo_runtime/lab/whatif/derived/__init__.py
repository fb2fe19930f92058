"""The arithmetic behind the costs of published cases. Each module writes its files anew when it is run."""
