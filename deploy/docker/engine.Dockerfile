# vLLM with the agent in it; built from the root of the repository:
#   docker build -f deploy/docker/engine.Dockerfile -t kvshuttle-engine:0.1.0 .
# The agent was run against this minor version of vLLM (CPU build); workers of one deployment must
# all have the same.
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY controlplane controlplane
COPY dataplane dataplane
COPY clients/python clients/python
# --no-deps for what vLLM has at versions of its own: the agent must not move its protobuf or numpy.
RUN pip install --no-cache-dir 'nixl>=1.0' 'grpcio>=1.80' 'grpcio-status>=1.80' 'structlog>=25.1' \
    && pip install --no-cache-dir --no-deps . \
    && python3 -c 'import kvshuttle.dataplane.connector, nixl'
WORKDIR /
