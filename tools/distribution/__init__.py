"""Packages of the last commit, built, checked and tried out: `make dist`, or `make release` of a tagged commit.

The commit is exported into an empty folder, so nothing that lies about in the checkout gets into a package. Links of
its README.md are made absolute there (`links.py`). The source package is built from it, and the wheel from that. twine
checks both, strictly. Each is then installed into an empty environment, whose `dbo` plans a published case. The version
is kept in `pyproject.toml`; a release needs a clean checkout, a tag `v` with that version on the commit, and a dated
heading in `CHANGELOG.md`. The upload is left to the maintainer who releases: `make release` prints its command.
"""
