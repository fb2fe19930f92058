"""The forward of a served model, and the decision whether to split a step."""
