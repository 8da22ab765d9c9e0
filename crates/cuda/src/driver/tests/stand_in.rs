//! The stand-in itself: what it must find, it finds.

use super::*;

/// One launch of a probe as one block; it runs on a device of its own, since a fault stays.
fn launch(
    device: &StandIn,
    entry: Entry,
    threads: u32,
    shared_bytes: u32,
    arguments: &[Arg<'_>],
) -> Result<()> {
    let context = context(device);
    let function = probes(device, &context).function(entry)?;
    let shape = Launch { shared_bytes, ..Launch::new([1, 1], threads) };
    Stream::new(&context)?.launch(&function, &shape, arguments)
}

fn floats(stream: &Stream, from: Span<'_>) -> Vec<f32> {
    let mut bytes = vec![0; from.bytes()];
    stream.read(&mut bytes, from).expect("copies");
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn a_graph_replays_on_what_the_memory_holds_now() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let [x, y] = [8, 8].map(|bytes| Buffer::new(&context, bytes).expect("memory"));
    let module = probes(&device, &context);
    let (put, add) =
        (module.function(PUT).expect("declared"), module.function(ACCUMULATE).expect("declared"));
    let set = |to: &Buffer, values: [f32; 2]| {
        stream.write(to.all(), &values.map(f32::to_ne_bytes).concat()).expect("copies");
    };
    set(&x, [1.0, 2.0]);
    set(&y, [0.0, 0.0]);
    let (one, two) = (Launch::new([1, 1], 1), Launch::new([1, 1], 2));
    let graph = stream.capture(|| {
        stream.launch(&add, &two, &[Arg::Memory(x.all()), Arg::Memory(y.all())])?;
        stream.launch(&put, &one, &[Arg::Memory(y.all()), Arg::U32(1), Arg::F32(-7.0)])?;
        stream.copy(x.span(0, 4)?, y.span(4, 4)?)
    });
    let graph = graph.expect("captures");
    assert_eq!(graph.nodes(), 3);
    assert_eq!(floats(&stream, y.all()), [0.0, 0.0], "a capture runs nothing");
    graph.launch(&stream).expect("replays");
    assert_eq!((floats(&stream, x.all()), floats(&stream, y.all())), (vec![-7.0, 2.0], vec![1.0, -7.0]));
    set(&x, [10.0, 20.0]);
    graph.launch(&stream).expect("replays");
    assert_eq!((floats(&stream, x.all()), floats(&stream, y.all())), (vec![-7.0, 20.0], vec![11.0, -7.0]));
}

#[test]
fn a_store_outside_of_memory_is_found() {
    for (bytes, index, said) in [
        // Within the memory's own pages: behind its end, and before it.
        (100, 25, "put: writes outside of argument 0, byte 0 of memory of 100 bytes"),
        (100, -1, "put: writes outside of argument 0, byte 0 of memory of 100 bytes"),
        // Where a page ends.
        (4096, 1024, "put: thread (0, 0, 0) of block (0, 0, 0) touches byte 4096 of memory of 4096 bytes"),
        (256, 64, "put: thread (0, 0, 0) of block (0, 0, 0) touches byte 256 of memory of 256 bytes"),
    ] {
        let Some(device) = stand_in() else { return };
        let context = context(&device);
        // So that nothing lies before the first.
        let [_, buffer, _] = [16, bytes, 16].map(|bytes| Buffer::new(&context, bytes).expect("memory"));
        let arguments = [Arg::Memory(buffer.all()), Arg::U32(index as u32), Arg::F32(1.0)];
        let error = launch(&device, PUT, 1, 0, &arguments).expect_err("it is outside");
        assert!(matches!(&error, Error::Call { code: 700, text, .. } if text == said), "{index}: {error}");
        let again = context.synchronize().expect_err("a fault stays").to_string();
        assert!(again.contains(said), "{again}");
    }
    let Some(device) = stand_in() else { return };
    let buffer = Buffer::new(&context(&device), 100).expect("memory");
    launch(&device, PUT, 1, 0, &[Arg::Memory(buffer.all()), Arg::U32(24), Arg::F32(1.0)]).expect("inside");
}

#[test]
fn memory_that_was_freed_is_found() {
    let free = |context: &Context, buffer: &Buffer| {
        let address = buffer.all().address();
        // SAFETY: the stand-in's memory, which nothing reads afterwards without its notice.
        context.call(|f| unsafe { (f.memory_free)(address) }, || "cuMemFree".into()).expect("frees");
    };
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let [x, y] = [8, 8].map(|bytes| Buffer::new(&context, bytes).expect("memory"));
    let function = probes(&device, &context).function(ACCUMULATE).expect("as declared");
    let shape = Launch::new([1, 1], 2);
    let arguments = [Arg::Memory(x.all()), Arg::Memory(y.all())];
    let graph = stream.capture(|| stream.launch(&function, &shape, &arguments)).expect("captures");
    graph.launch(&stream).expect("replays");
    free(&context, &x);
    let said = graph.launch(&stream).expect_err("it was freed").to_string();
    assert!(said.contains("accumulate: argument 0 is byte 0 of memory of 8 bytes that was freed"), "{said}");

    let Some(device) = stand_in() else { return };
    let context = self::context(&device);
    let buffer = Buffer::new(&context, 8).expect("memory");
    let stream = Stream::new(&context).expect("a stream");
    free(&context, &buffer);
    let said = stream.fill(buffer.all(), 0).expect_err("it was freed").to_string();
    assert!(
        said.contains("a copy or fill of 8 bytes at byte 0 of memory of 8 bytes that was freed"),
        "{said}"
    );
}

/// Past the wrappers, which would refuse it themselves.
#[test]
fn an_allocation_in_a_window_ends_the_capture() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    device.calls();
    let mut status = Ok(());
    let captured = stream.capture(|| {
        let mut at = 0;
        // SAFETY: the pointer is to our own variable.
        let allocate = |f: &sys::DriverFunctions| unsafe { (f.memory_allocate)(&mut at, 77) };
        status = context.call(allocate, || "cuMemAlloc".into());
        Ok(())
    });
    assert!(matches!(status, Err(Error::Call { code: 900, .. })), "{status:?}");
    assert!(matches!(captured.err(), Some(Error::Call { code: 901, .. })));
    assert_eq!(device.calls(), ["begin 1", "allocate 77 inside a capture", "end"]);
    stream.capture(|| Ok(())).expect("the stream is as before");
}

#[test]
fn memory_that_nothing_wrote_is_nan() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let buffer = Buffer::new(&context, 400).expect("memory");
    let mut pool = Reservation::new(&context, 1 << 20).expect("addresses");
    pool.grow(1).expect("grows");
    let first = pool.span(0, pool.backed_bytes()).expect("backed").bytes();
    stream.fill(pool.span(0, first).expect("backed"), 0).expect("fills");
    pool.grow(first + 1).expect("grows");
    for fresh in [buffer.all(), pool.span(first, first).expect("backed")] {
        assert!(floats(&stream, fresh).iter().all(|x| x.is_nan()));
    }
    assert!(floats(&stream, pool.span(0, first).expect("backed")).iter().all(|&x| x == 0.0), "it stays");
    let shared = Buffer::new(&context, 4).expect("memory");
    for _ in 0..2 {
        stream.fill(shared.all(), 0).expect("fills");
        launch(&device, DYNAMIC, 1, 4, &[Arg::Memory(shared.all()), Arg::U32(0)]).expect("inside");
        assert!(floats(&stream, shared.all())[0].is_nan());
    }
}

#[test]
fn misuse_of_a_block_is_found() {
    let Some(device) = stand_in() else { return };
    launch(&device, HALF_A_BLOCK, 128, 0, &[]).expect("threads that have ended are not waited for");
    assert!(launch(&device, HALF_A_BLOCK, 1025, 0, &[]).is_err(), "too many threads");
    for (entry, second, shared_bytes, said) in [
        (HALF_A_WARP, None, 0, "half_a_warp: lanes of a warp wait at different barriers"),
        (DIVIDE, Some(0), 0, "divide: thread (0, 0, 0) of block (0, 0, 0) divides an integer by zero"),
        (DYNAMIC, Some(65), 260, "dynamic: writes behind the end of its dynamic shared memory"),
        (DYNAMIC, Some(64), 256, "dynamic: thread (0, 0, 0) of block (0, 0, 0) touches address"),
    ] {
        let Some(device) = stand_in() else { return };
        let buffer = Buffer::new(&context(&device), 256).expect("memory");
        let arguments: Vec<_> = [Arg::Memory(buffer.all())].into_iter().chain(second.map(Arg::U32)).collect();
        let told = launch(&device, entry, 64, shared_bytes, &arguments).expect_err("it is wrong").to_string();
        assert!(told.contains(said), "{told}");
    }
}

#[test]
fn shared_memory_is_that_of_the_device() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let buffer = Buffer::new(&context, 256).expect("memory");
    let function = probes(&device, &context).function(DYNAMIC).expect("as declared");
    let launch = |bytes| {
        let shape = Launch { shared_bytes: bytes, ..Launch::new([1, 1], 1) };
        stream.launch(&function, &shape, &[Arg::Memory(buffer.all()), Arg::U32(bytes / 4 - 1)])
    };
    launch(48 << 10).expect("no opt-in is needed");
    assert!(launch((48 << 10) + 4).is_err());
    let most = context.device().shared_bytes_max as u32;
    assert!(function.allow_shared(most + 1).is_err());
    function.allow_shared(most).expect("the device has as much");
    function.allow_shared(64 << 10).expect("it has more");
    launch(most).expect("it was asked for");
    assert_eq!(function.blocks_per_multiprocessor(256, 0).expect("told"), 8);
    assert_eq!(function.blocks_per_multiprocessor(256, most).expect("told"), 1);
}

#[test]
fn a_missing_barrier_shows_in_the_other_order() {
    let run = |entry: Entry, reversed: bool| {
        let device = stand_in()?;
        let context = context(&device);
        let (stream, buffer) = (Stream::new(&context).ok()?, Buffer::new(&context, 512).ok()?);
        device.set_reversed(reversed);
        stream.fill(buffer.all(), 0).expect("fills");
        launch(&device, entry, 64, 0, &[Arg::Memory(buffer.all())]).expect("runs");
        Some(floats(&stream, buffer.all()))
    };
    let Some(neighbours) = run(NEIGHBOUR, false) else { return };
    let want = (0..64).map(|i| (i + 1) % 64).chain((0..64).map(|i| i / 32 * 32 + (i + 1) % 32));
    assert_eq!(neighbours, want.map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(run(NEIGHBOUR, true), Some(neighbours));
    assert_ne!(run(RACE, false), run(RACE, true));
}

#[test]
fn memory_has_the_size_that_was_set() {
    let Some(device) = stand_in() else { return };
    device.set_memory(1 << 20);
    let context = context(&device);
    assert_eq!(context.device().memory_bytes, 1 << 20);
    let half = Buffer::new(&context, 1 << 19).expect("memory");
    assert!(matches!(Buffer::new(&context, (1 << 19) + 1).err(), Some(Error::Call { code: 2, .. })));
    let mut pool = Reservation::new(&context, 1 << 30).expect("addresses are no memory");
    assert!(pool.grow((1 << 19) + 1).is_err());
    assert_eq!(context.memory_bytes().expect("told"), (1 << 19, 1 << 20));
    drop(half);
    pool.grow((1 << 19) + 1).expect("there is room again");
}

#[test]
fn a_call_fails_when_it_is_told_to() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let buffer = Buffer::new(&context, 8).expect("memory");
    device.fail("fill", 2, 719);
    let fills: Vec<bool> = (0..4).map(|_| stream.fill(buffer.all(), 0).is_ok()).collect();
    assert_eq!(fills, [true, true, false, true]);
}

#[test]
fn only_what_was_built_in_compiles() {
    let Some(device) = stand_in() else { return };
    let compiler = device.compiler();
    assert!(kernels::SOURCES.iter().all(|source| compiler.cubin(source, "sm_90a").is_ok()));
    assert!(compiler.cubin(&Source { text: "other", ..PROBES }, "sm_90a").is_err());
    assert!(compiler.cubin(&PROBES, "sm_75").is_err(), "unknown to it");
    let cubin = compiler.cubin(&PROBES, "sm_80").expect("compiles");
    let said = Module::load(&context(&device), &cubin.bytes).err().expect("of another device").to_string();
    assert!(said.contains("CUDA_ERROR_NO_BINARY_FOR_GPU") && said.contains("not for this device"), "{said}");
}
