# A worker on SGLang's own image: CUDA, torch and the engine are there, turnmill is added to them.
#   docker build --tag turnmill-worker .
#   docker run --gpus 1 --init --env REDIS_URL=redis://HOST:6379 turnmill-worker --engine sglang --model ID
ARG SGLANG_VERSION=0.5.23
FROM lmsysorg/sglang:v${SGLANG_VERSION}

ARG SGLANG_VERSION
COPY pyproject.toml README.md LICENSE /src/
COPY producer /src/producer
COPY worker /src/worker
# The adapter uses names of one SGLang version, so another one ends the build here, not the run later.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /src \
 && python3 -c "from importlib.metadata import version as v; assert v('sglang').startswith('${SGLANG_VERSION}'), v('sglang')" \
 && turnmill worker --help > /dev/null
COPY --chmod=755 examples/docker/one-gpu.sh /usr/local/bin/one-gpu

WORKDIR /
# It execs the worker, so that signals reach it.
ENTRYPOINT ["turnmill", "worker"]
CMD ["--help"]
