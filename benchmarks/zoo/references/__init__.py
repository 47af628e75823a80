# SPDX-License-Identifier: Apache-2.0
"""Reference draws of the zoo's models: by NumPyro's NUTS on twins of the models, checked."""
