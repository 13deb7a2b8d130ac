"""Experiments on real ranks, configured with Hydra. Run from a checkout: python -m experiments.attention --help"""
