//! Runs single launches on the stand-in.

mod bits;

use ingle_cuda::driver::{Arg, Buffer, Context, Entry, Launch, Module, Stream};
use ingle_cuda::kernels::{self, Source};
use ingle_cuda::stand_in::StandIn;

pub use bits::{assert_bits, bytes, floats, numbers};

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
    /// No memory.
    Nothing,
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
                Value::Nothing => Arg::Nothing,
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
