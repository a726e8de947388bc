"""Plug-ins for RL trainers, one module for each, none a fork. Importing this loads no trainer."""
