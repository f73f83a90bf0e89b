"""What a run would find out minutes after Ray has started: values, files, machines, budgets; asked before.

One module for each kind of thing; each has one function that takes the composed trainer config and yields violations.
The list of all of them, with the rules of the modes, is ``verl_pg_plugin.config.validate.everything``.
"""
