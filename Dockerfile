# syntax=docker/dockerfile:1
#
# make EXTRA=gpu image     CUDA. The tag has version and commit, so that a build does not take the place of the last
# make image               no GPU: development and trials. The tag ends with -cpu
#
# docker run --rm -v tinker-data:/data tinker-server:TAG keys add NAME      prints an API key: without one, no start
# docker run --init --gpus all --shm-size 8g -p 8000:8000 -v tinker-data:/data tinker-server:TAG serve --model NAME=HUB_ID
# (the ranks of the trainer and vLLM talk through /dev/shm, of which docker grants 64 MiB by default)

FROM python:3.12-slim-trixie

# gpu or cpu
ARG EXTRA=gpu

# A C++ compiler: Triton and torch.compile build kernels at run time. libnuma: vLLM's CPU kernels.
# pg_dump of PostgreSQL 17, for `tinker-server backup`: it refuses a newer server than itself.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 postgresql-client-17 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 tinker \
    && install --directory --owner tinker /data /backups

WORKDIR /srv/tinker-server
COPY . .
# The context has no git, so whoever builds says what is built: see tinker_server/release.py.
ARG VERSION COMMIT=unknown
RUN [ -z "$VERSION" ] || printf '{"version": "%s", "commit": "%s"}' "$VERSION" "$COMMIT" > tinker_server/build.json
LABEL org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$COMMIT" \
    org.opencontainers.image.licenses="Apache-2.0"
# Outside the CPU build everything is on PyPI: torch's CUDA wheels bring CUDA's libraries themselves.
RUN --mount=type=cache,target=/root/.cache/pip .ci/install.sh /srv/venv "$EXTRA,postgres,otel"

# HF_HOME: base models fetched from the hub survive with the rest of the data.
ENV PATH=/srv/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface \
    TINKER_SERVER_HOST=0.0.0.0 \
    TINKER_SERVER_PORT=8000 \
    TINKER_SERVER_DATA_DIR=/data

USER tinker
VOLUME /data
EXPOSE 8000

# Loading a large base model takes minutes, during which the check may fail.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/api/v1/healthz', timeout=8)"]

ENTRYPOINT ["tinker-server"]
CMD ["serve", "--model", "tinker-server/tiny-vl"]
