"""The command line: everything about arguments and YAML files, from ``sys.argv`` to the Trainer.

An option takes this way:

1. :func:`mhla_tasks.commandline.main.main` finds the command or the tool.
2. :func:`mhla_tasks.commandline.arguments.read_words` reads the arguments, once, into a ``CommandLine``.
3. :func:`mhla_tasks.commandline.sources.read_sources` reads the files that it names: a list of sources, the weakest first.
4. :func:`mhla_tasks.commandline.plan.make_plan` renames options that have moved (``moved_keys``), checks all of them
   (``problems``, ``trust``), adds what a checkpoint remembers (``memory``), and merges them (``merging``) into one
   configuration.
5. ``mhla_tasks.commandline.parser.SuiteCLI`` hands that configuration to LightningCLI, which checks the types. Model and data
   agree (``agreement``), and the files go into the run's folder (``options``).
6. LightningCLI builds model, data and Trainer, and ``parser`` calls ``Trainer.fit``, ``validate``, ``test`` or ``predict``.
"""
