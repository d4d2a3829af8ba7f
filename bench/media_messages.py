"""Processor time of a processed picture's way: worker, API process, engine, rank.

    python bench/media_messages.py [--rounds 24]

Milliseconds of one thread, least and median of the rounds, for the tensors of pictures of Qwen2-VL's
family, which encoders resize. "all threads" has those of ZeroMQ. `rank` copies what it reads, as it does
for a device.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time

import numpy as np
import zmq

from quire.core.types import MediaItem, Request, StopConditions
from quire.engine import message_codec
from quire.engine.messages import AddRequests, request_to_wire
from quire.executors.step_arrays import StepArrayReader, StepArrayWriter, create_area
from quire.media.image_ops import to_tensor
from quire.media.media_worker import MEDIA_DECODER, MediaResult
from quire.sandbox.heap import keep_freed_memory
from quire.sandbox.pipe import WorkerPipe

SIZES = (504, 532), (2156, 3836)
UNCOUNTED = 4


def show(what, seconds):
    ms = [1000 * one for one in seconds[UNCOUNTED:]]
    print(f"  {what:34} {min(ms):8.3f} {statistics.median(ms):8.3f}", flush=True)


def forked(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def from_worker(size, rounds):
    """Send a picture from a worker to this process. Returns its tensor."""
    ours, theirs = socket.socketpair()
    go_ours, go_theirs = socket.socketpair()

    def worker():
        pipe, pixels, took = WorkerPipe(theirs, MEDIA_DECODER), np.ones((1, *size, 3), np.uint8), []
        for _ in range(rounds):
            go_theirs.recv(1)
            made = pixels + np.uint8(1)
            began = time.thread_time()
            pipe.send(MediaResult((to_tensor("pixels", made),), b"{}"))
            took.append(time.thread_time() - began)
        show("worker sends", took)

    pid = forked(worker)
    pipe, took = WorkerPipe(ours, MEDIA_DECODER), []
    for _ in range(rounds):
        go_ours.sendall(b"x")
        began = time.thread_time()
        result = pipe.receive()
        took.append(time.thread_time() - began)
    os.waitpid(pid, 0)
    show("API process receives, in a thread", took)
    return result.tensors[0]


def to_engine(tensor, rounds):
    """Send a request with the picture to another process, as a transport does."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"

        def engine():
            router, took = zmq.Context().socket(zmq.ROUTER), []
            router.bind(address)
            for _ in range(rounds):
                sender, *_ = router.recv_multipart()
                router.send_multipart([sender, b"ready"])
                router.poll()
                began = time.thread_time()
                _, *frames = router.recv_multipart(copy=False)
                message_codec.decode_to_engine([one.buffer for one in frames])
                took.append(time.thread_time() - began)
                router.send_multipart([sender, b"read"])
            show("engine's thread receives", took)
            time.sleep(0.3)  # its last message is sent

        pid, context = forked(engine), zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        item = MediaItem("image", b"digest", 0, 9, ((0, 9),), (tensor,))
        request = Request("a", tuple(range(366)), StopConditions(1), media=(item,))
        took, together = [], []
        for _ in range(rounds):
            dealer.send(b"go")
            dealer.recv()
            began, all_began = time.thread_time(), time.process_time()
            frames = message_codec.encode_to_engine(AddRequests(1, [request_to_wire(request)]))
            dealer.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
            took.append(time.thread_time() - began)
            dealer.recv()
            together.append(time.process_time() - all_began)
        os.waitpid(pid, 0)
        show("API process's loop sends", took)
        show("API process, all threads", together)
        context.destroy(0)


def to_ranks(tensor, rounds):
    """Share the picture with a rank."""
    fd = create_area()
    writer, reader, took, read = StepArrayWriter(fd), StepArrayReader(fd), [], []
    target = np.empty(len(tensor.data), np.uint8)
    for number in range(rounds):
        began = time.thread_time()
        places = writer.place(number, [tensor.data])
        took.append(time.thread_time() - began)
        began = time.thread_time()
        target[:] = np.frombuffer(reader.views(places)[0], np.uint8)
        read.append(time.thread_time() - began)
        writer.release(number)
    show("engine shares with ranks", took)
    show("rank reads", read)
    writer.close()
    os.close(fd)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    a = parser.parse_args()
    keep_freed_memory()
    for size in SIZES:
        print(f"{size[1]} x {size[0]} pixels, load {os.getloadavg()[0]:.1f}", flush=True)
        tensor = from_worker(size, a.rounds)
        to_engine(tensor, a.rounds)
        to_ranks(tensor, a.rounds)


if __name__ == "__main__":
    main()
