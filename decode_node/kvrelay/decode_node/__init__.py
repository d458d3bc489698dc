"""The decode node: reserves pages, takes hand-offs in, and generates the tokens after the first one."""
