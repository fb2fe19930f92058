"""Which of the long tests CI runs, by content and not by date: `python -m tools.shards plan`.

A *shard* is a part of the long tests with a name. `tests/shards.json` lists the shards, and the word of `make` that
runs each. `tests/ledger.json` says on which commit each shard last passed, and what its inputs were then. CI runs the
shards that always run, then those whose inputs have changed, then the stalest, as many as fit into the budget that
`tests/shards.json` states. CI fails if a shard is too old. `make test-shards` runs it, and its ledger is committed.

`catalogue` reads the list, `inputs` finds the files that a shard depends on, `ledger` keeps what passed, `history` asks
git, `plan` chooses, `runner` calls `make` and counts, `recording` writes down what passed, `report` says all that in
words, and `slow_tests` finds slow tests that no shard holds. All of it needs Python alone, so that it runs before there
is an environment.
"""
