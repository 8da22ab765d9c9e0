//! The driver's wrappers against a driver without a device (`fake.cpp`): what they call, in which order, and what they refuse.

use std::ffi::{CString, c_char, c_int};
use std::io::{Write, stderr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};

use libloading::Library;

use super::*;

/// The fake, loaded for one test alone, so that tests can run side by side.
struct Fake {
    driver: &'static Driver,
    library: Library,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// `None`, with a word about it, where there is no g++.
    fn new() -> Option<Self> {
        if Command::new("g++").arg("--version").stdout(Stdio::null()).status().is_err() {
            // On standard error itself: the test runner shows nothing that a passing test prints.
            let _ = writeln!(stderr(), "not run: no g++ (1 count: a test of the CUDA driver's wrappers)");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("libfake.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver/fake.cpp");
        let mut build = Command::new("g++");
        build.args(["-std=c++17", "-shared", "-fPIC", "-o"]).arg(&path).arg(source);
        assert!(build.status().expect("g++ runs").success());
        let driver = Driver::open(&[path.to_str().expect("a path in UTF-8")]).expect("the fake opens");
        // SAFETY: a library of our own without initializers.
        let library = unsafe { Library::new(&path) }.expect("it is there");
        Some(Self { driver: Box::leak(Box::new(driver)), library, _folder: folder })
    }

    /// The calls since the last look.
    fn calls(&self) -> Vec<String> {
        let mut log = vec![0u8; 1 << 16];
        // SAFETY: the type is that of the function; the buffer has the size that is said.
        let n = unsafe {
            let take = self.library.get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(b"fake_take");
            take.expect("it is there")(log.as_mut_ptr().cast(), log.len())
        };
        String::from_utf8_lossy(&log[..n]).lines().map(String::from).collect()
    }

    /// The next call of this name returns this status.
    fn fail(&self, call: &str, status: i32) {
        let call = CString::new(call).expect("no NUL");
        // SAFETY: the type is that of the function; the name ends with NUL.
        unsafe {
            let fail = self.library.get::<unsafe extern "C" fn(*const c_char, c_int)>(b"fake_fail");
            fail.expect("it is there")(call.as_ptr(), status);
        }
    }

    fn context(&self) -> Context {
        Context::new(self.driver, 0).expect("the fake has a device")
    }
}

const ENTRY: Entry = Entry { name: "k", params: &[Param::Memory, Param::U32, Param::F32] };

#[test]
fn objects_go_before_their_context_and_the_ledger_is_even() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    assert_eq!(context.device().arch(), "sm_90a");
    assert_eq!(context.device().multiprocessors, 132);
    assert!(matches!(Context::new(fake.driver, 1), Err(Error::NoSuchDevice { index: 1, count: 1 })));
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
    fake.calls();
    drop(buffer);
    assert_eq!(fake.calls(), ["synchronize", "free"], "the device comes to rest first");
    drop(stream);
    assert_eq!(fake.calls(), ["unstream", "release"], "the context goes last");
}

#[test]
fn errors_name_the_call() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    fake.fail("allocate", 2);
    let said = Buffer::new(&context, 4096).err().expect("told to fail").to_string();
    assert!(
        said.starts_with("cuMemAlloc of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory): free"),
        "{said}"
    );
    // A number that no list has.
    fake.fail("allocate", 12345);
    let said = Buffer::new(&context, 1).err().expect("told to fail").to_string();
    assert!(said.contains("CUDA error 12345 (unknown to this driver)"), "{said}");
    fake.fail("module", 209);
    let said = Module::load(&context, b"cubin").err().expect("told to fail").to_string();
    assert!(said.contains("not for this device") && said.contains("update the driver"), "{said}");
    assert_eq!(context.ledger().tally().allocations, 0, "what failed is no allocation");
}

#[test]
fn a_reservation_grows_where_it_is() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    let mut pool = Reservation::new(&context, 10_000).expect("addresses");
    assert_eq!((pool.reserved_bytes(), pool.backed_bytes()), (12_288, 0));
    assert!(pool.span(0, 1).is_err(), "nothing is backed");
    fake.calls();
    pool.grow(5000).expect("grows");
    assert_eq!(fake.calls(), ["create 8192", "map 8192", "access 8192"]);
    let address = pool.span(0, 8192).expect("backed").address();
    pool.grow(8000).expect("has it already");
    assert_eq!(fake.calls(), [""; 0]);
    for (call, undone) in [
        ("create", &[][..]),
        ("map", &["create 4096", "uncreate"]),
        ("access", &["create 4096", "map 4096", "unmap 4096", "uncreate"]),
    ] {
        let before = context.ledger().tally().live_bytes;
        fake.fail(call, 2);
        assert!(pool.grow(10_000).is_err(), "{call}");
        assert_eq!(fake.calls(), undone, "{call}");
        assert_eq!((pool.backed_bytes(), context.ledger().tally().live_bytes), (8192, before));
    }
    pool.grow(12_288).expect("grows");
    assert_eq!(pool.span(0, 12_288).expect("backed").address(), address);
    assert!(pool.grow(12_289).is_err());
    fake.calls();
    drop(pool);
    let gone = ["synchronize", "unmap 8192", "uncreate", "unmap 4096", "uncreate", "unreserve 12288"];
    assert_eq!(fake.calls(), gone);
    assert_eq!(context.ledger().tally().live_bytes, 0);
}

#[test]
fn a_launch_passes_what_the_declaration_says() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    let (stream, buffer) =
        (Stream::new(&context).expect("a stream"), Buffer::new(&context, 8).expect("memory"));
    let module = Module::load(&context, b"cubin").expect("loads");
    let wrong = Entry { params: &[Param::Memory, Param::U32], ..ENTRY };
    let said = module.function(wrong).err().expect("two parameters of three").to_string();
    assert!(said.starts_with("k: parameters of [8, 4, 4] bytes"), "{said}");
    let function = module.function(ENTRY).expect("as declared");
    assert_eq!(function.usage().expect("told").registers, 40);
    fake.calls();
    let shape = Launch { shared_bytes: 5, overlap: true, ..Launch::new([3, 1], 64) };
    let arguments = [Arg::Memory(buffer.all()), Arg::U32(42), Arg::F32(0.5)];
    stream.launch(&function, &shape, &arguments).expect("launches");
    stream
        .launch(&function, &Launch::new([1, 1], 32), &[Arg::Nothing, Arg::U32(1), Arg::F32(-2.0)])
        .expect("launches");
    assert_eq!(fake.calls(), ["launch 3 64 5: 1 42 0.5 106", "launch 1 32 0: 0 1 -2 0"]);
    assert!(stream.launch(&function, &Launch::new([0, 1], 32), &arguments).is_err(), "no blocks");
    assert!(stream.launch(&function, &shape, &arguments[..2]).is_err(), "an argument less");
    assert_eq!(fake.calls(), [""; 0]);
}

#[test]
fn a_graph_keeps_what_it_refers_to() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    let stream = Stream::new(&context).expect("a stream");
    let [used, unused] = [16, 17].map(|bytes| Buffer::new(&context, bytes).expect("memory"));
    let module = Module::load(&context, b"cubin").expect("loads");
    let function = module.function(ENTRY).expect("as declared");
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
    fake.calls();
    drop((used, function, module));
    assert_eq!(fake.calls(), [""; 0], "the graph has them");
    drop(unused);
    assert_eq!(fake.calls(), ["synchronize", "free"]);
    graph.launch(&stream).expect("replays");
    fake.calls();
    drop(graph);
    let gone = fake.calls();
    assert_eq!(gone[..2], ["synchronize", "uninstantiate"], "the graph before what it refers to");
    assert!(gone.contains(&"free".into()) && gone.contains(&"unload".into()), "{gone:?}");
    assert_eq!(context.ledger().tally().live_bytes, 0);
}

#[test]
fn a_window_refuses_what_a_step_must_not_do() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
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
    fake.calls();
    let captured = stream.capture(|| {
        going.take();
        assert!(!fake.calls().contains(&"free".into()));
        Ok(())
    });
    assert!(captured.err().expect("cancelled").to_string().starts_with("a free of 9 bytes"));
    assert!(fake.calls().ends_with(&["end".into(), "ungraph".into(), "synchronize".into(), "free".into()]));
    assert_eq!(context.ledger().tally().live_bytes, tally.live_bytes);

    stream.upload(buffer.all(), &pinned, 0).expect("outside it is allowed");
    assert_eq!(pinned.bytes().expect("once it is done").len(), 16);
}

#[test]
fn however_a_window_is_left_the_capture_ends() {
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    let stream = Stream::new(&context).expect("a stream");
    fake.calls();
    let failed = stream.capture(|| Err(Error::Refused("the step's own".into())));
    assert_eq!(failed.err().expect("failed").to_string(), "the step's own");
    assert_eq!(fake.calls(), ["begin 1", "end", "ungraph"]);
    let panicked = catch_unwind(AssertUnwindSafe(|| stream.capture(|| panic!("planted")).map(drop)));
    assert!(panicked.is_err());
    assert_eq!(fake.calls(), ["begin 1", "end", "ungraph"]);
    for call in ["begin", "end", "instantiate", "bring graph"] {
        fake.fail(call, 901);
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
    let Some(fake) = Fake::new() else { return };
    let context = fake.context();
    let (stream, buffer) =
        (Stream::new(&context).expect("a stream"), Buffer::new(&context, 4).expect("memory"));
    let mut pinned = Pinned::new(&context, 8).expect("memory");
    pinned.bytes().expect("idle").copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    fake.calls();
    stream.upload(buffer.all(), &pinned, 2).expect("inside");
    assert!(stream.upload(buffer.all(), &pinned, 5).is_err(), "beyond its end");
    assert_eq!(fake.calls(), ["upload 4", "record"]);
    pinned.bytes().expect("waits")[0] = 9;
    assert_eq!(fake.calls(), ["wait for event"]);
    pinned.bytes().expect("idle");
    assert_eq!(fake.calls(), [""; 0], "once is enough");
    stream.download(&mut pinned, 4, buffer.all()).expect("inside");
    assert_eq!(pinned.bytes().expect("waits"), [9, 2, 3, 4, 3, 4, 5, 6]);
    stream.upload(buffer.all(), &pinned, 0).expect("inside");
    fake.calls();
    drop(pinned);
    assert_eq!(fake.calls(), ["wait for event", "unpin"], "freed after its copy");
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
