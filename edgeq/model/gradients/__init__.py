"""Hold the rules by which gradients go back through operators. `edgeq.model.backward` applies them.

A rule gets the gradients of a node's outputs and returns those of its inputs. All gradients are float32 and have the
shape of their tensor. The shapes are those of one sample, so the rules write them as constants.
"""
