"""How models say what their programs are, and how adapters are found."""
