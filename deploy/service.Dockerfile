# One image for all four services; the command says which one runs.
#
# BASE is any image with python3 (3.11 or newer) and its venv module, so that no registry is needed.
# Networks that re-sign TLS: give their CA bundle as the build secret `build_ca`; it stays out of the image.

ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python3 -m venv /opt/venv

# Dependencies first: they change less often than the source, and this layer is the slow one.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=build_ca \
    if [ -s /run/secrets/build_ca ]; then export PIP_CERT=/run/secrets/build_ca; fi && \
    python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt && \
    /opt/venv/bin/pip install --quiet --requirement requirements.txt --constraint constraints.txt

COPY README.md ./
COPY shared shared
COPY services services
RUN --mount=type=secret,id=build_ca \
    if [ -s /run/secrets/build_ca ]; then export PIP_CERT=/run/secrets/build_ca; fi && \
    /opt/venv/bin/pip install --quiet --no-deps . && \
    /opt/venv/bin/pip check && \
    /opt/venv/bin/python -m compileall -q /opt/venv/lib

FROM ${BASE}
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /var/lib/paddock paddock && \
    install -d -o paddock -g paddock -m 700 /var/lib/paddock /run/paddock
COPY --from=build /opt/venv /opt/venv
COPY deploy/ready.py /usr/local/lib/paddock/ready.py
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PADDOCK_STATE_DIR=/var/lib/paddock
USER paddock
WORKDIR /var/lib/paddock
ENTRYPOINT ["paddock", "serve"]
