"""Environments that need a thread, a process or a virtual environment of their own (docs/environments.md#isolation).

1. `EnvironmentServer` starts a process, with this interpreter or with that of a virtual environment, which imports the
   environment's class once.
2. That process forks a child for each trajectory: it starts in milliseconds, shares the memory of what was imported,
   and takes one trajectory with it if it dies.
3. When that process ends, what is left of it goes with it; it is started anew for the next trajectory.
4. A child speaks OpenEnv's protocol over a Unix socket with `RemoteEnvironment`, which is the trajectory's environment.
"""
