"""From what ops cost to when splitting pays, and in which order to issue it."""
