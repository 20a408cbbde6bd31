# Control plane, gateway and command line in one image; built from the root of the repository:
#   docker build -f deploy/docker/kvshuttle.Dockerfile -t kvshuttle:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY controlplane controlplane
COPY dataplane dataplane
COPY clients/python clients/python
RUN python -m venv /opt/kvshuttle \
    && /opt/kvshuttle/bin/pip install --no-cache-dir '.[controlplane,gateway,cli,otel]'

FROM python:3.11-slim
COPY --from=build /opt/kvshuttle /opt/kvshuttle
RUN useradd --system --uid 65532 --home-dir /var/lib/kvshuttle --create-home kvshuttle
ENV PATH=/opt/kvshuttle/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /var/lib/kvshuttle
CMD ["kvshuttle-controlplane", "--help"]
