"""Measuring so that the difference is the candidates' and not the machine's."""
