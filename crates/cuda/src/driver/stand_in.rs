//! A stand-in for a GPU, for tests: a library that is the driver and NVRTC at once and runs kernels on the host.
//!
//! g++ builds it from the `.cu` files and from `crates/cuda/stand_in`, once for all tests, into the target folder. Kernels
//! run when they are launched, block after block, a block's threads as fibers; captured graphs keep the values of their
//! arguments and replay them. Fresh memory is NaN, whatever is read as. An access that no allocation has, a write around
//! one, an argument or a replay with memory that was freed, and barriers that not all threads reach end the launch with
//! the driver's errors (700, 719), whose text says what happened; as with a device, they stay.
//!
//! What it cannot show: what the device's compiler makes of a kernel, work that overlaps, and speed.

use std::ffi::{CString, c_char, c_int};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Write as _, stderr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;
use sha2::{Digest, Sha256};

use super::Driver;
use crate::compile::{Compiler, Search, hex};
use crate::driver::Nvrtc;
use crate::kernels::{self, Source};

/// The library's own files.
const FILES: &[(&str, &str)] = &[
    ("block.hpp", include_str!("../../stand_in/block.hpp")),
    ("host.hpp", include_str!("../../stand_in/host.hpp")),
    ("library.hpp", include_str!("../../stand_in/library.hpp")),
    ("memory.hpp", include_str!("../../stand_in/memory.hpp")),
    ("block.cpp", include_str!("../../stand_in/block.cpp")),
    ("driver.cpp", include_str!("../../stand_in/driver.cpp")),
    ("memory.cpp", include_str!("../../stand_in/memory.cpp")),
    ("nvrtc.cpp", include_str!("../../stand_in/nvrtc.cpp")),
];

/// Nothing is contracted, as on the device; kernels read memory as what they like.
const OPTIONS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    // Headers in folders of the kernels' include those beside them.
    "-I.",
];

/// What a proof of graphs must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing is wrong.
    None,
    /// A replay does nothing.
    EmptyReplay,
    /// A replay leaves out its last launch.
    ShortReplay,
    /// A replay has the first one's step data: positions, slots and tables of another time.
    FrozenData,
    /// Fills do nothing: what is to be poisoned is not.
    NoFill,
}

/// A device of its own, with its own memory, log and faults: tests can run side by side. It has compute capability 9.0, 132
/// multiprocessors, and 1 GiB of memory.
pub struct StandIn {
    driver: &'static Driver,
    library: Library,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl StandIn {
    /// One that knows all kernels; `None`, with a word on standard error, where there is no g++. `what` is not run then.
    ///
    /// # Panics
    /// When g++ refuses a kernel, with its words.
    pub fn new(what: &str) -> Option<Self> {
        Self::with(what, &[])
    }

    /// One that knows further files of kernels, too.
    ///
    /// # Panics
    /// As [`StandIn::new`].
    pub fn with(what: &str, further: &[&Source]) -> Option<Self> {
        let Ok(version) = Command::new("g++").arg("--version").output() else {
            // On standard error itself: the test runner shows nothing that a passing test prints.
            stderr().write_all(format!("not run: no g++ (1 count: {what})\n").as_bytes()).ok();
            return None;
        };
        let built = build(&version.stdout, further);
        // The loader tells libraries apart by their files: a copy has variables of its own.
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("stand-in.so");
        fs::copy(&built, &path).expect("the library is there");
        let driver = Driver::at(&path).expect("it is a driver");
        // SAFETY: a library of our own, which is loaded already.
        let library = unsafe { Library::new(&path) }.expect("it is there");
        Some(Self { driver, library, path, _folder: folder })
    }

    /// It, as a driver.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Its file, for a process that is to take it for driver and NVRTC.
    pub fn file(&self) -> &Path {
        &self.path
    }

    /// Where it is found as NVRTC, and nothing else.
    pub fn search(&self) -> Search {
        Search { named: Some(self.path.clone()), ..Search::default() }
    }

    /// It, as a compiler without a cache. It compiles what it was built from, and nothing else.
    pub fn compiler(&self) -> Compiler {
        Compiler::new(Nvrtc::open(&self.path).expect("it is a compiler"), None)
    }

    /// The driver's calls since the last look, in words.
    pub fn calls(&self) -> Vec<String> {
        let mut log = vec![0u8; 2 << 20];
        // SAFETY: the type is that of the function; the buffer has the size that is said.
        let n = unsafe {
            let take =
                self.library.get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(b"stand_in_take");
            take.expect("it is there")(log.as_mut_ptr().cast(), log.len())
        };
        String::from_utf8_lossy(&log[..n]).lines().map(String::from).collect()
    }

    /// A launch, after so many others, does nothing and reports no error.
    pub fn lose_launch(&self, after: usize) {
        self.fail("launch", after, 0);
    }

    /// The next call of this name, by its word in the log, returns this status; `after` so many that do not.
    pub fn fail(&self, call: &str, after: usize, status: i32) {
        let call = CString::new(call).expect("no NUL");
        let after = c_int::try_from(after).expect("a number of calls");
        // SAFETY: the type is that of the function; the name ends with NUL.
        unsafe {
            let fail =
                self.library.get::<unsafe extern "C" fn(*const c_char, c_int, c_int)>(b"stand_in_fail");
            fail.expect("it is there")(call.as_ptr(), after, status);
        }
    }

    /// Plants a fault that lasts until another one, or none, is planted.
    pub fn plant(&self, fault: Fault) {
        // SAFETY: the type is that of the function.
        unsafe {
            let plant = self.library.get::<unsafe extern "C" fn(c_int)>(b"stand_in_plant");
            plant.expect("it is there")(fault as c_int);
        }
    }

    /// Sets the memory of the device, in bytes.
    pub fn set_memory(&self, bytes: usize) {
        // SAFETY: the type is that of the function.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(usize)>(b"stand_in_memory");
            set.expect("it is there")(bytes);
        }
    }

    /// Sets how many multiprocessors the device has, for contexts from now on.
    pub fn set_multiprocessors(&self, n: i32) {
        // SAFETY: the type is that of the function.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(c_int)>(b"stand_in_multiprocessors");
            set.expect("it is there")(n);
        }
    }

    /// Whether blocks, and threads between two barriers, run from the last to the first. No result may depend on it.
    pub fn set_reversed(&self, reversed: bool) {
        // SAFETY: the type is that of the function.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(c_int)>(b"stand_in_reverse");
            set.expect("it is there")(reversed.into());
        }
    }
}

/// What a file of kernels becomes: it alone, as for the device, and the table of what it defines.
fn unit(source: &Source) -> String {
    let mut text = format!("#include \"host.hpp\"\n#include \"{}.cu\"\nnamespace stand_in {{\n", source.name);
    text += "static const Kernel all[] = {\n";
    for entry in source.entries {
        writeln!(text, "    KERNEL({}),", entry.name).expect("writes");
    }
    let headers = kernels::included(source.text);
    let hash = headers.iter().fold(hashed(0xcbf2_9ce4_8422_2325, source.text), |hash, (name, text)| {
        hashed(hashed(hash, name), text)
    });
    writeln!(text, "}};\nstatic const Source source(\"{}\", {hash}ull, all);\n}}", source.name)
        .expect("writes");
    text
}

/// FNV-1a of a text and a zero, as in `nvrtc.cpp`.
fn hashed(hash: u64, text: &str) -> u64 {
    text.bytes().chain([0]).fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A file to compile, and the name of the object it becomes: a hash of all that decides it.
struct Object {
    file: String,
    text: String,
    name: String,
}

impl Object {
    fn new(file: String, text: String, included: &[(&str, &str)], compiler: &[u8]) -> Self {
        let mut hash = Sha256::new();
        let options = options().join(" ");
        let names = included.iter().flat_map(|(name, text)| [*name, *text]);
        for part in
            [&file, &text, options.as_str()].into_iter().chain(names).map(str::as_bytes).chain([compiler])
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let name = format!("{}.o", hex(&hash.finalize()));
        Self { file, text, name }
    }
}

fn options() -> Vec<&'static str> {
    let mut options = OPTIONS.to_vec();
    // Without it each fused multiply-add is a call.
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        options.push("-mfma");
    }
    options
}

/// The library, built now or before. Processes that want it at once wait for one of them.
fn build(compiler: &[u8], further: &[&Source]) -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let target = program.ancestors().nth(2).expect("it lies in a folder of the target folder");
    let folder = target.join("stand-in");
    fs::create_dir_all(&folder).expect("the target folder can be written");
    let lock = File::create(folder.join("lock")).expect("the target folder can be written");
    lock.lock().expect("the lock is free at some time");

    let own = FILES.iter().filter(|(name, _)| name.ends_with(".cpp"));
    let own = own.map(|(name, text)| Object::new((*name).into(), (*text).into(), FILES, compiler));
    let sources = kernels::SOURCES.iter().chain(further);
    let units = sources.clone().map(|source| {
        let mut included = kernels::included(source.text);
        included.extend(FILES.iter().filter(|(name, _)| ["block.hpp", "host.hpp"].contains(name)));
        included.push((source.name, source.text));
        Object::new(format!("{}.unit.cpp", source.name), unit(source), &included, compiler)
    });
    let objects: Vec<Object> = own.chain(units).collect();
    let names = objects.iter().flat_map(|object| object.name.bytes()).collect::<Vec<u8>>();
    let library = folder.join(format!("{}.so", hex(&Sha256::digest(names))));
    if library.exists() {
        return library;
    }

    let files = tempfile::tempdir_in(&folder).expect("the target folder can be written");
    let write = |name: &str, text: &str| {
        let path = files.path().join(name);
        fs::create_dir_all(path.parent().expect("inside the folder")).expect("makes a folder");
        fs::write(path, text).expect("writes a file");
    };
    FILES.iter().chain(kernels::HEADERS).for_each(|(name, text)| write(name, text));
    sources.for_each(|source| write(&format!("{}.cu", source.name), source.text));
    objects.iter().for_each(|object| write(&object.file, &object.text));

    let missing: Vec<&Object> = objects.iter().filter(|object| !folder.join(&object.name).exists()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(object) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut compile = Command::new("g++");
            compile.args(options()).arg("-c").arg(&object.file).args(["-o", &object.name]);
            finish(compile.current_dir(files.path()));
            fs::rename(files.path().join(&object.name), folder.join(&object.name)).expect("moves a file");
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(missing.len());
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        // The first that failed tells why.
        workers
            .into_iter()
            .for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
    let mut link = Command::new("g++");
    link.args(["-shared", "-o", "stand-in.so"]).current_dir(files.path());
    finish(link.args(objects.iter().map(|object| folder.join(&object.name))));
    fs::rename(files.path().join("stand-in.so"), &library).expect("moves a file");
    library
}

fn finish(command: &mut Command) {
    let done = command.output().expect("g++ runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
