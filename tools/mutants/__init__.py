"""Mutation testing of the core: `make mutants`.

A *mutant* is a module with one small mistake, such as `<` for `<=`. If the tests of the module still pass, then no test
notices the mistake: the mutant *survives*. Here each module of `targets.TARGETS` gets a fixed sample of mutants, and
each mutant those tests that execute what is mutated.

mutmut and cosmic-ray were tried. mutmut 3.8 has no sample by seed, leaves out every function with a decorator (all
properties), mutates the texts of errors, and numbers mutants by their place in a function, so that a list of
equivalent mutants goes stale with each change. cosmic-ray 8.7 writes each mutant into the tree and starts pytest for
it, which here is seconds of imports for each. So these modules do what is needed: `mutations` finds mutants and takes
the sample, `equivalents` knows those that no test can kill, `server` imports what a module's tests need once and forks
a process for each mutant, `finder` puts the mutant into that process, `trial` has the plugins of pytest, and `report`
tells the outcome.
"""
