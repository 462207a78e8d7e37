"""The speculative round: draft tree, verification, acceptance, commit, extend (D1, D9)."""
