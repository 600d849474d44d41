# The three images: docker build --target operator|router|worker .   (podman and buildah alike)
#
#   tools ──> <image>-packages   what requirements/<image>.txt locks: rebuilt when that file changes
#         └─> <image>-code       core/ and the image's own folder:   rebuilt when code changes
#   base  ──> <image>            the two, copied: no pip, no compiler, nothing to write to
#   builder ──> worker-kernels    FlashInfer's kernels, compiled: rebuilt when its release changes
#
# BASE holds Python 3.11 or later with `venv`, and Debian's libstdc++; nothing else is taken from it.
# BUILDER holds the same Python in the same place, and a compiler of C, and of C++ for DEVICE=cuda: it
# compiles what the worker's image has of C, and the modules that decide for worker and router.
# A package index other than pip's own, and the certificate to trust it by, are build secrets:
#   --secret id=pip_conf,src=/etc/pip.conf  --secret id=pip_cert,src=ca.pem
# DEVICE=cuda installs what requirements/cuda.txt locks, FlashInfer with it, and compiles FlashInfer's
# kernels ahead for GPUs of ARCHS and models of KERNELS, tens of minutes once: the image has no C++
# compiler, and a pod no place that outlives it. A model of another head size or type wants KERNELS to
# name it, or BASE=$BUILDER, which compiles when a pod first needs a kernel. NIXL for CUDA 12 is left
# out: it is never loaded together with a torch for CUDA 13.
# DEVICE=cpu installs requirements/worker.txt, and leaves out two thirds that are only ever used beside
# a GPU: Triton and CUDA's libraries too. Where torch is linked with one, an empty one of its name takes
# its place: nothing of it is called, and Python is told to look for a library's functions only when
# they are (lazy.pth). So the same wheels, and no others, run on both.
ARG BASE=python:3.12-slim
ARG BUILDER=python:3.12
ARG DEVICE=cuda

FROM ${BASE} AS tools
ENV PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements/build.txt requirements/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=pip_cert \
    --mount=type=cache,target=/var/cache/pip \
    if [ -s /run/secrets/pip_cert ]; then export PIP_CERT=/run/secrets/pip_cert; fi; \
    python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --require-hashes --no-deps -r requirements/build.txt \
    && python3 -m venv --without-pip /opt/medha

FROM tools AS code
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY core core

# What the three have in common: an unprivileged user, and /tmp as the one place to write.
FROM ${BASE} AS base
ENV PATH=/opt/medha/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=/opt/code HOME=/tmp USER=medha \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Nothing in these images changes its user.
USER 0
RUN find / -xdev -type f -perm /6000 -delete
WORKDIR /tmp

FROM tools AS operator-packages
COPY requirements/operator.txt requirements/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=pip_cert \
    --mount=type=cache,target=/var/cache/pip \
    if [ -s /run/secrets/pip_cert ]; then export PIP_CERT=/run/secrets/pip_cert; fi; \
    /opt/tools/bin/pip --python /opt/medha/bin/python install --compile \
        --require-hashes --no-deps -r requirements/operator.txt

FROM code AS operator-code
COPY operator operator
RUN /opt/tools/bin/pip install --no-index --no-deps --no-build-isolation --compile --target /code .

FROM base AS operator
COPY --from=operator-packages /opt/medha /opt/medha
COPY --from=operator-code /code /opt/code
USER 65532:65532
ENTRYPOINT ["python", "-m", "medha_operator"]

FROM tools AS router-packages
COPY requirements/router.txt requirements/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=pip_cert \
    --mount=type=cache,target=/var/cache/pip \
    if [ -s /run/secrets/pip_cert ]; then export PIP_CERT=/run/secrets/pip_cert; fi; \
    /opt/tools/bin/pip --python /opt/medha/bin/python install --compile \
        --require-hashes --no-deps -r requirements/router.txt

FROM ${BUILDER} AS router-code
WORKDIR /build
COPY --from=code /opt/tools /opt/tools
COPY --from=code /build /build
COPY router router
RUN /opt/tools/bin/pip install --no-index --no-deps --no-build-isolation --compile --target /code .

FROM base AS router
COPY --from=router-packages /opt/medha /opt/medha
COPY --from=router-code /code /opt/code
USER 65532:65532
ENTRYPOINT ["python", "-m", "medha_router"]

FROM ${BUILDER} AS nothing
RUN echo | gcc -x c -shared -nostdlib -o /nothing.so -

FROM tools AS worker-packages
ARG DEVICE
COPY requirements/worker.txt requirements/cuda.txt requirements/
COPY --from=nothing /nothing.so ./
# An entry of the lock is `name==version` and its indented lines.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=pip_cert \
    --mount=type=cache,target=/var/cache/pip \
    if [ -s /run/secrets/pip_cert ]; then export PIP_CERT=/run/secrets/pip_cert; fi; \
    case "$DEVICE" in cuda) lock=cuda; without=nixl-cu12 ;; \
        cpu) lock=worker; without="triton|nixl-cu12" ;; \
        *) echo "DEVICE is $DEVICE: must be cuda or cpu" >&2; exit 2 ;; esac; \
    awk -v without="^($without)==" '/^[^ ]/ { drop = $0 ~ without } !drop' \
        requirements/$lock.txt > wanted.txt \
    && /opt/tools/bin/pip --python /opt/medha/bin/python install --compile \
        --require-hashes --no-deps -r wanted.txt \
    && cd /opt/medha/lib/python3*/site-packages \
    && if [ "$DEVICE" = cpu ]; then rm -rf nvidia/cudnn/lib/libcudnn_*.so* nixl_ep_cu* \
        nvidia/cu13/lib/libcusolver*.so* nvidia/cu13/lib/libnvrtc*.so* \
        nvidia/cu13/lib/libnvJitLink.so* nvidia/cu13/lib/libnvperf_*.so* nvidia/cu13/lib/lib*.a \
        nvidia/nvshmem/lib/*.bc nvidia/nvshmem/lib/*.a torch/include torch/bin/ptxas \
        torch/lib/libtorch_cuda_linalg.so \
        && for linked in nvidia/cu13/lib/libcublas.so.* nvidia/cu13/lib/libcublasLt.so.* \
            nvidia/cu13/lib/libcufft.so.* nvidia/cu13/lib/libcurand.so.* \
            nvidia/cu13/lib/libcusparse.so.* nvidia/cusparselt/lib/libcusparseLt.so.* \
            nvidia/nccl/lib/libnccl.so.*; \
        do [ -f "$linked" ] && cp /build/nothing.so "$linked" || exit 1; done \
        && echo "import os, sys; sys.setdlopenflags(os.RTLD_LAZY)" > lazy.pth; fi \
    && /opt/medha/bin/python -c "import torch, nixl._api"

FROM ${BUILDER} AS cuda-kernels
ARG ARCHS="8.0 9.0a"
ARG KERNELS="--head-dims 128 --dtypes bfloat16"
WORKDIR /build
COPY --from=worker-packages /opt/medha /opt/medha
COPY core/medha/__init__.py core/medha/errors.py medha/
COPY core/medha/compiled/__init__.py medha/compiled/
COPY worker/medha_worker/__init__.py worker/medha_worker/precompile_kernels.py worker/medha_worker/flashinfer.py \
    worker/medha_worker/nvcc.py medha_worker/
RUN --mount=type=cache,target=/var/cache/kernels FLASHINFER_WORKSPACE_BASE=/var/cache/kernels \
    /opt/medha/bin/python -m medha_worker.precompile_kernels /kernels --archs "$ARCHS" $KERNELS

FROM tools AS cpu-kernels
RUN mkdir /kernels

FROM ${DEVICE}-kernels AS worker-kernels

FROM ${BUILDER} AS worker-code
WORKDIR /build
COPY --from=code /opt/tools /opt/tools
COPY --from=code /build /build
COPY worker worker
RUN /opt/tools/bin/pip install --no-index --no-deps --no-build-isolation --compile --target /code .

FROM base AS worker
COPY --from=worker-packages /opt/medha /opt/medha
COPY --from=worker-kernels /kernels /opt/code
COPY --from=worker-code /code /opt/code
USER 65532:65532
ENTRYPOINT ["python", "-m", "medha.cli"]
CMD ["pod"]
