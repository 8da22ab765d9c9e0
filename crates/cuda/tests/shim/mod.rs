//! Runs single launches on the stand-in, and compares results as bits.

use ingle_cuda::driver::{Arg, Buffer, Context, Entry, Launch, Module, Stream};
use ingle_cuda::kernels::{self, Source};
use ingle_cuda::stand_in::StandIn;

/// What runs kernels on this machine.
pub struct Host {
    device: StandIn,
    context: Context,
    stream: Stream,
    sources: Vec<&'static Source>,
}

impl Host {
    /// A device for one test, that knows further files of kernels, too; `None`, with a word about it, where there is no g++.
    pub fn new(what: &str, further: &[&'static Source]) -> Option<Self> {
        let device = StandIn::with(what, further)?;
        let context = Context::new(device.driver(), 0).expect("it has a device");
        let stream = Stream::new(&context).expect("a stream");
        let sources = kernels::SOURCES.iter().chain(further).copied().collect();
        Some(Self { device, context, stream, sources })
    }
}

/// An argument: the number of a memory, or a value.
#[derive(Clone, Copy)]
pub enum Value {
    Memory(usize),
    U32(u32),
    F32(f32),
}

/// Runs one launch and gives the memories back. It runs in two orders, which must come to the same.
pub fn launch(
    host: &Host,
    entry: Entry,
    shape: Launch,
    memory: &[Vec<u8>],
    arguments: &[Value],
) -> Vec<Vec<u8>> {
    let Host { device, context, stream, sources } = host;
    let source = sources.iter().find(|source| source.entries.contains(&entry)).expect("a file has it");
    let cubin = device.compiler().cubin(source, "sm_90a").expect("compiles");
    let function = Module::load(context, &cubin.bytes).and_then(|module| module.function(entry));
    let function = function.unwrap_or_else(|error| panic!("{error}"));
    function.allow_shared(shape.shared_bytes).expect("the device has as much");
    let [forwards, backwards] = [false, true].map(|reversed| {
        device.set_reversed(reversed);
        let buffers: Vec<Buffer> = memory
            .iter()
            .map(|bytes| {
                let buffer = Buffer::new(context, bytes.len()).expect("memory");
                stream.write(buffer.all(), bytes).expect("copies");
                buffer
            })
            .collect();
        let arguments: Vec<Arg<'_>> = arguments
            .iter()
            .map(|value| match *value {
                Value::Memory(number) => Arg::Memory(buffers[number].all()),
                Value::U32(value) => Arg::U32(value),
                Value::F32(value) => Arg::F32(value),
            })
            .collect();
        stream.launch(&function, &shape, &arguments).unwrap_or_else(|error| panic!("{error}"));
        let read = |buffer: &Buffer| {
            let mut bytes = vec![0; buffer.all().bytes()];
            stream.read(&mut bytes, buffer.all()).expect("copies");
            bytes
        };
        buffers.iter().map(read).collect::<Vec<_>>()
    });
    assert!(forwards == backwards, "{}: depends on the order of threads", entry.name);
    forwards
}

pub fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Where two rows of results differ first, NaN payloads aside.
fn first_difference(got: &[f32], want: &[f32]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} results for {}", got.len(), want.len()));
    }
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let at = got.iter().zip(want).position(|(&a, &b)| !same(a, b))?;
    Some(format!(
        "{at}: {:e} ({:08x}) for {:e} ({:08x})",
        got[at],
        got[at].to_bits(),
        want[at],
        want[at].to_bits()
    ))
}

#[track_caller]
pub fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    if let Some(difference) = first_difference(got, want) {
        panic!("{what}: {difference}");
    }
    // The control: one step in the last place of one result must show.
    if let Some(at) = want.iter().rposition(|x| x.is_finite()) {
        let mut off = want.to_vec();
        off[at] = f32::from_bits(off[at].to_bits() ^ 1);
        assert!(first_difference(got, &off).is_some(), "{what}: a planted difference does not show");
    }
}

/// Numbers of all sizes; with `edges`, those that rounding and limits make special too.
pub fn numbers(seed: u64, count: usize, edges: bool) -> Vec<f32> {
    const EDGES: &[f32] =
        &[0.0, -0.0, 1e-40, -1e-40, 65504.0, 65519.9, 65520.0, -1e30, 3.4e38, f32::INFINITY, f32::NAN];
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    let mut x: Vec<f32> = (0..count)
        .map(|_| {
            let unit = (next() as f32 / u32::MAX as f32) * 2.0 - 1.0;
            unit * 2f32.powi((next() % 12) as i32 - 6)
        })
        .collect();
    if edges {
        x.iter_mut().step_by(23).zip(EDGES).for_each(|(x, edge)| *x = *edge);
    }
    x
}
