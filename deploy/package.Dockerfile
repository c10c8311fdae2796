# Redis or HAProxy from Debian's package, where no image registry is at hand:
#   docker build -t my/haproxy --build-arg PACKAGE=haproxy --build-arg ACCOUNT=haproxy - < deploy/package.Dockerfile
#   docker build -t my/redis --build-arg PACKAGE=redis-server --build-arg ACCOUNT=redis - < deploy/package.Dockerfile
# PADDOCK_BALANCER_IMAGE and PADDOCK_REDIS_IMAGE tell Compose to take them.
# Networks that re-sign TLS: give their CA bundle as the build secret `build_ca`; it stays out of the image.

ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG PACKAGE ACCOUNT
RUN --mount=type=secret,id=build_ca \
    if [ -s /run/secrets/build_ca ]; then set -- -o Acquire::https::CAInfo=/run/secrets/build_ca; fi && \
    apt-get "$@" update -qq && \
    apt-get "$@" install -y -qq --no-install-recommends "${PACKAGE}" && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* && \
    install -d -o "${ACCOUNT}" -g "${ACCOUNT}" /data
USER ${ACCOUNT}
WORKDIR /data
