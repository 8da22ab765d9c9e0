//! The driver's wrappers on a stand-in for a device: what they call, in which order, and what they refuse.

mod stand_in;

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::stand_in::StandIn;
use super::*;
use crate::kernels::{self, Source};

/// Kernels that only these tests have.
const PROBES: Source = Source {
    name: "probes",
    text: include_str!("tests/probes.cu"),
    entries: &[PUT, ACCUMULATE, HALF_A_BLOCK, HALF_A_WARP, DIVIDE, DYNAMIC, NEIGHBOUR, RACE],
};
const PUT: Entry = Entry { name: "put", params: &[Param::Memory, Param::U32, Param::F32] };
const ACCUMULATE: Entry = Entry { name: "accumulate", params: &[Param::Memory, Param::Memory] };
const HALF_A_BLOCK: Entry = Entry { name: "half_a_block", params: &[] };
const HALF_A_WARP: Entry = Entry { name: "half_a_warp", params: &[Param::Memory] };
const DIVIDE: Entry = Entry { name: "divide", params: &[Param::Memory, Param::U32] };
const DYNAMIC: Entry = Entry { name: "dynamic", params: &[Param::Memory, Param::U32] };
const NEIGHBOUR: Entry = Entry { name: "neighbour", params: &[Param::Memory] };
const RACE: Entry = Entry { name: "race", params: &[Param::Memory] };

/// A device for one test alone, that knows the probes.
fn stand_in() -> Option<StandIn> {
    StandIn::with("a test of the CUDA driver's wrappers", &[&PROBES])
}

fn context(device: &StandIn) -> Context {
    Context::new(device.driver(), 0).expect("it has a device")
}

fn probes(device: &StandIn, context: &Context) -> Module {
    let cubin = device.compiler().cubin(&PROBES, "sm_90a").expect("compiles");
    Module::load(context, &cubin.bytes).expect("loads")
}

#[test]
fn objects_go_before_their_context_and_the_ledger_is_even() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    assert_eq!(context.device().arch(), "sm_90a");
    assert_eq!(context.device().multiprocessors, 132);
    assert!(matches!(Context::new(device.driver(), 1), Err(Error::NoSuchDevice { index: 1, count: 1 })));
    let empty = context.ledger().tally();
    let stream = Stream::new(&context).expect("a stream");
    let buffer = Buffer::new(&context, 100).expect("memory");
    let full = context.ledger().tally();
    assert_eq!((full.allocations, full.live_bytes), (1, 100));
    assert_ne!(empty, full);
    stream.write(buffer.span(10, 3).expect("inside"), &[1, 2, 3]).expect("copies");
    let mut back = [0; 2];
    stream.read(&mut back, buffer.span(11, 2).expect("inside")).expect("copies");
    assert_eq!(back, [2, 3]);
    assert!(buffer.span(99, 2).is_err() && buffer.span(usize::MAX, 2).is_err());
    assert!(buffer.span(10, 20).expect("inside").part(15, 6).is_err());
    assert!(stream.write(buffer.all(), &[0; 99]).is_err(), "another size");
    drop(context);
    device.calls();
    drop(buffer);
    assert_eq!(device.calls(), ["synchronize", "free"], "the device comes to rest first");
    drop(stream);
    assert_eq!(device.calls(), ["unstream", "release"], "the context goes last");
}

#[test]
fn errors_name_the_call() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    device.fail("allocate", 0, 2);
    let said = Buffer::new(&context, 4096).err().expect("told to fail").to_string();
    assert!(
        said.starts_with("cuMemAlloc of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory): free"),
        "{said}"
    );
    // A number that no list has.
    device.fail("allocate", 0, 12345);
    let said = Buffer::new(&context, 1).err().expect("told to fail").to_string();
    assert!(said.contains("CUDA error 12345 (unknown to this driver)"), "{said}");
    device.fail("module", 0, 209);
    let said = Module::load(&context, b"cubin").err().expect("told to fail").to_string();
    assert!(said.contains("not for this device") && said.contains("update the driver"), "{said}");
    assert_eq!(context.ledger().tally().allocations, 0, "what failed is no allocation");
}

#[test]
fn a_reservation_grows_where_it_is() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let mut pool = Reservation::new(&context, 10_000).expect("addresses");
    assert_eq!((pool.reserved_bytes(), pool.backed_bytes()), (12_288, 0));
    assert!(pool.span(0, 1).is_err(), "nothing is backed");
    device.calls();
    pool.grow(5000).expect("grows");
    assert_eq!(device.calls(), ["create 8192", "map 8192", "access 8192"]);
    let address = pool.span(0, 8192).expect("backed").address();
    pool.grow(8000).expect("has it already");
    assert_eq!(device.calls(), [""; 0]);
    for (call, undone) in [
        ("create", &[][..]),
        ("map", &["create 4096", "uncreate"]),
        ("access", &["create 4096", "map 4096", "unmap 4096", "uncreate"]),
    ] {
        let before = context.ledger().tally().live_bytes;
        device.fail(call, 0, 2);
        assert!(pool.grow(10_000).is_err(), "{call}");
        assert_eq!(device.calls(), undone, "{call}");
        assert_eq!((pool.backed_bytes(), context.ledger().tally().live_bytes), (8192, before));
    }
    pool.grow(12_288).expect("grows");
    assert_eq!(pool.span(0, 12_288).expect("backed").address(), address);
    assert!(pool.grow(12_289).is_err());
    device.calls();
    drop(pool);
    let gone = ["synchronize", "unmap 8192", "uncreate", "unmap 4096", "uncreate", "unreserve 12288"];
    assert_eq!(device.calls(), gone);
    assert_eq!(context.ledger().tally().live_bytes, 0);
}

#[test]
fn a_launch_passes_what_the_declaration_says() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let (stream, buffer) =
        (Stream::new(&context).expect("a stream"), Buffer::new(&context, 8).expect("memory"));
    let module = probes(&device, &context);
    let wrong = Entry { params: &[Param::Memory, Param::U32], ..PUT };
    let said = module.function(wrong).err().expect("two parameters of three").to_string();
    assert!(said.starts_with("put: parameters of [8, 4, 4] bytes"), "{said}");
    let function = module.function(PUT).expect("as declared");
    assert_eq!(function.usage().expect("told").registers, 40);
    device.calls();
    let shape = Launch { shared_bytes: 5, overlap: true, ..Launch::new([3, 1], 64) };
    let arguments = [Arg::Memory(buffer.all()), Arg::U32(1), Arg::F32(0.5)];
    stream.launch(&function, &shape, &arguments).expect("launches");
    let second = [Arg::Memory(buffer.all()), Arg::U32(0), Arg::F32(-2.0)];
    stream.launch(&function, &Launch::new([1, 1], 32), &second).expect("launches");
    assert_eq!(device.calls(), ["launch put 3x1x1 64x1x1 5 overlap", "launch put 1x1x1 32x1x1 0"]);
    let mut written = [0; 8];
    stream.read(&mut written, buffer.all()).expect("copies");
    assert_eq!(written[..], [(-2f32).to_ne_bytes(), 0.5f32.to_ne_bytes()].concat());
    device.calls();
    assert!(stream.launch(&function, &Launch::new([0, 1], 32), &arguments).is_err(), "no blocks");
    assert!(stream.launch(&function, &shape, &arguments[..2]).is_err(), "an argument less");
    assert_eq!(device.calls(), [""; 0]);
}

#[test]
fn a_graph_keeps_what_it_refers_to() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let [used, unused] = [16, 17].map(|bytes| Buffer::new(&context, bytes).expect("memory"));
    let module = probes(&device, &context);
    let function = module.function(PUT).expect("as declared");
    let graph = stream
        .capture(|| {
            assert!(stream.is_capturing()?);
            for _ in 0..2 {
                stream.launch(
                    &function,
                    &Launch::new([1, 1], 32),
                    &[Arg::Memory(used.all()), Arg::U32(0), Arg::F32(0.0)],
                )?;
            }
            stream.fill(used.all(), 0)
        })
        .expect("captures");
    assert_eq!(graph.nodes(), 3);
    device.calls();
    drop((used, function, module));
    assert_eq!(device.calls(), [""; 0], "the graph has them");
    drop(unused);
    assert_eq!(device.calls(), ["synchronize", "free"]);
    graph.launch(&stream).expect("replays");
    device.calls();
    drop(graph);
    let gone = device.calls();
    assert_eq!(gone[..2], ["synchronize", "uninstantiate"], "the graph before what it refers to");
    assert!(gone.contains(&"free".into()) && gone.contains(&"unload".into()), "{gone:?}");
    assert_eq!(context.ledger().tally().live_bytes, 0);
}

#[test]
fn a_window_refuses_what_a_step_must_not_do() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    let buffer = Buffer::new(&context, 16).expect("memory");
    let mut pinned = Pinned::new(&context, 16).expect("memory");
    let mut pool = Reservation::new(&context, 4096).expect("addresses");
    let event = Event::new(&context, false).expect("an event");
    let graph = stream.capture(|| stream.fill(buffer.all(), 0)).expect("captures");
    let tally = context.ledger().tally();

    // Allocations: refused before the driver sees them, and fatal to the capture even when the step goes on.
    type Wanted<'a> = (&'static str, Box<dyn FnMut() -> Result<()> + 'a>);
    let allocations: [Wanted<'_>; 4] = [
        ("device memory of 77 bytes", Box::new(|| Buffer::new(&context, 77).map(drop))),
        ("pinned memory of 5 bytes", Box::new(|| Pinned::new(&context, 5).map(drop))),
        ("a module of 3 bytes", Box::new(|| Module::load(&context, b"abc").map(drop))),
        ("a step of an address range of 4096 bytes", Box::new(|| pool.grow(1))),
    ];
    for (what, mut wanted) in allocations {
        let captured = stream.capture(|| {
            assert!(matches!(wanted(), Err(Error::InWindow { .. })), "{what}");
            stream.fill(buffer.all(), 1)
        });
        let said = captured.err().expect("cancelled").to_string();
        assert!(said.starts_with(&format!("{what} inside a capture window")), "{said}");
        assert!(!stream.is_capturing().expect("told"));
    }
    assert_eq!(context.ledger().tally(), tally);

    // Everything else: an error, which the step may hand on.
    let refused: [Wanted<'_>; 8] = [
        ("waiting for the device", Box::new(|| context.synchronize())),
        ("waiting for a stream", Box::new(|| stream.synchronize())),
        ("recording an event", Box::new(|| event.record(&stream))),
        ("a copy from memory of the host", Box::new(|| stream.upload(buffer.all(), &pinned, 0))),
        ("a copy from memory of the host", Box::new(|| stream.write(buffer.all(), &[0; 16]))),
        ("a copy to memory of the host", Box::new(|| stream.read(&mut [0; 16], buffer.all()))),
        ("a replay", Box::new(|| graph.launch(&stream))),
        ("a second capture", Box::new(|| stream.capture(|| Ok(())).map(drop))),
    ];
    for (what, wanted) in refused {
        let said = stream.capture(wanted).err().expect("refused").to_string();
        assert_eq!(said, format!("{what} inside a capture window"));
    }

    // Memory that goes meanwhile is freed when the window is closed, and there is no graph.
    let mut going = Some(Buffer::new(&context, 9).expect("memory"));
    device.calls();
    let captured = stream.capture(|| {
        going.take();
        assert!(!device.calls().contains(&"free".into()));
        Ok(())
    });
    assert!(captured.err().expect("cancelled").to_string().starts_with("a free of 9 bytes"));
    assert!(device.calls().ends_with(&["end".into(), "ungraph".into(), "synchronize".into(), "free".into()]));
    assert_eq!(context.ledger().tally().live_bytes, tally.live_bytes);

    stream.upload(buffer.all(), &pinned, 0).expect("outside it is allowed");
    assert_eq!(pinned.bytes().expect("once it is done").len(), 16);
}

#[test]
fn however_a_window_is_left_the_capture_ends() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let stream = Stream::new(&context).expect("a stream");
    device.calls();
    let failed = stream.capture(|| Err(Error::Refused("the step's own".into())));
    assert_eq!(failed.err().expect("failed").to_string(), "the step's own");
    assert_eq!(device.calls(), ["begin 1", "end", "ungraph"]);
    let panicked = catch_unwind(AssertUnwindSafe(|| stream.capture(|| panic!("planted")).map(drop)));
    assert!(panicked.is_err());
    assert_eq!(device.calls(), ["begin 1", "end", "ungraph"]);
    for call in ["begin", "end", "instantiate", "bring graph"] {
        device.fail(call, 0, 901);
        assert!(stream.capture(|| Ok(())).is_err(), "{call}");
        assert!(!stream.is_capturing().expect("told"), "{call}");
        stream.synchronize().expect("no window is open");
    }
    assert_eq!(context.ledger().tally().live_bytes, 0);
    assert_eq!(context.ledger().tally().allocations, context.ledger().tally().frees);
    stream.capture(|| Ok(())).expect("the stream is as before");
}

#[test]
fn pinned_memory_waits_for_its_copies() {
    let Some(device) = stand_in() else { return };
    let context = context(&device);
    let (stream, buffer) =
        (Stream::new(&context).expect("a stream"), Buffer::new(&context, 4).expect("memory"));
    let mut pinned = Pinned::new(&context, 8).expect("memory");
    pinned.bytes().expect("idle").copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    device.calls();
    stream.upload(buffer.all(), &pinned, 2).expect("inside");
    assert!(stream.upload(buffer.all(), &pinned, 5).is_err(), "beyond its end");
    assert_eq!(device.calls(), ["upload 4", "record"]);
    pinned.bytes().expect("waits")[0] = 9;
    assert_eq!(device.calls(), ["wait for event"]);
    pinned.bytes().expect("idle");
    assert_eq!(device.calls(), [""; 0], "once is enough");
    stream.download(&mut pinned, 4, buffer.all()).expect("inside");
    assert_eq!(pinned.bytes().expect("waits"), [9, 2, 3, 4, 3, 4, 5, 6]);
    stream.upload(buffer.all(), &pinned, 0).expect("inside");
    device.calls();
    drop(pinned);
    assert_eq!(device.calls(), ["wait for event", "unpin"], "freed after its copy");
}

#[test]
fn a_missing_driver_is_an_error_that_names_what_was_tried() {
    let error = Driver::open(&["libingle-none.so.1", "libingle-none.so"]).err().expect("there is none");
    let said = error.to_string();
    assert!(said.contains("finds none of libingle-none.so.1, libingle-none.so;"), "{said}");
}

/// A library that is there and is no driver is told apart from one that is not there.
#[test]
fn a_library_without_the_functions_is_named() {
    let error = Driver::open(&["libingle-none.so", "libc.so.6"]).err().expect("libc is no driver");
    assert!(matches!(&error, Error::NoFunction { function: "cuInit", .. }), "{error}");
}

#[test]
fn arguments_must_be_those_of_the_declaration() {
    let entry = Entry { name: "scale", params: &[Param::Memory, Param::U32, Param::F32] };
    assert!(entry.check(&[Arg::Nothing, Arg::U32(3), Arg::F32(0.5)]).is_ok());
    for wrong in [&[Arg::Nothing, Arg::U32(3)][..], &[Arg::Nothing, Arg::F32(3.0), Arg::F32(0.5)]] {
        let said = entry.check(wrong).expect_err("not its arguments").to_string();
        assert!(said.starts_with("scale: takes [Memory, U32, F32], given "), "{said}");
    }
}

/// The device reads the first bytes of each value.
#[test]
fn arguments_lie_at_the_beginning_of_their_value() {
    assert_eq!(Arg::U32(0x0102_0304).bits().to_ne_bytes()[..4], 0x0102_0304u32.to_ne_bytes());
    assert_eq!(Arg::F32(1.5).bits().to_ne_bytes()[..4], 1.5f32.to_ne_bytes());
    assert_eq!(Arg::Nothing.bits(), 0);
}
