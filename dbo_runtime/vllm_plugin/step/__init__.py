"""The forward of a served model, and the decision whether a step is split."""
