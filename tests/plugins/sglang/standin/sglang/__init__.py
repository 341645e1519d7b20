# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang on CPU ranks: what weft's hooks touch, with its names and signatures.

Its arithmetic is plain and in float32; nothing here is a server.
"""
