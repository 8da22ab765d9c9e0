//! Kernels from source to machine code: where NVRTC is, how it is called, and the cache of what it made.
//!
//! The cache is a folder of `HASH.cubin` files. The hash covers source, every header the source includes, options,
//! architecture and the compiler's version, so an entry is never stale; each entry begins with a digest of its own content,
//! so a damaged one is compiled again. Entries are written beside and renamed, so readers need no lock.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use crate::driver::{Compiled, Nvrtc};
use crate::kernels::{self, Source};
use crate::{Error, Result};

/// Names of the library, newest first.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
} else {
    &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
};

/// How every kernel is compiled. Nothing is contracted, flushed or approximated unless a kernel says so itself: the numeric
/// contract needs each operation as it is written.
pub const OPTIONS: &[&str] =
    &["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17", "-default-device"];

/// The user's path of the library: it comes before every other place.
pub const NVRTC_VARIABLE: &str = "INGLE_NVRTC";

/// Most bytes of the cache. A few hundred kernels, each for a few architectures and compilers, take a tenth of it.
const CACHE_BYTES: u64 = 256 << 20;

/// Where NVRTC is looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The file that the user named; then nothing else is tried.
    pub named: Option<PathBuf>,
    /// Folders, in order; after the loader's own path.
    pub folders: Vec<PathBuf>,
}

impl Search {
    /// The places that this machine and the environment name: `INGLE_NVRTC`; else the loader's path, toolkits
    /// (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda*`), and the packages of Python environments (`VIRTUAL_ENV`,
    /// `CONDA_PREFIX`, those of interpreters on `PATH`, the user's and the system's).
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let named = var(NVRTC_VARIABLE).map(PathBuf::from);
        let mut folders = Vec::new();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| var(name)).map(PathBuf::from);
        for toolkit in toolkits.chain(newest_first(Path::new("/usr/local"), "cuda")) {
            folders.push(toolkit.join("lib64"));
            let targets = newest_first(&toolkit.join("targets"), "");
            folders.extend(targets.into_iter().map(|target| target.join("lib")));
        }
        let mut prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| var(name)).map(PathBuf::from).collect();
        let path = var("PATH").unwrap_or_default();
        let interpreters = std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
        prefixes.extend(interpreters.filter_map(|folder| folder.parent().map(Path::to_path_buf)));
        if let Some(home) = var("HOME").map(PathBuf::from) {
            prefixes.push(home.join(".local"));
            prefixes.extend(newest_first(&home.join(".pyenv/versions"), ""));
        }
        prefixes.extend(["/usr", "/usr/local"].map(PathBuf::from));
        for prefix in prefixes {
            for python in newest_first(&prefix.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let nvidia = python.join(packages).join("nvidia");
                    folders.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|lib| nvidia.join(lib)));
                }
            }
        }
        // A folder that is not there need not be tried, and a list of hundreds would help nobody.
        let mut seen = BTreeSet::new();
        folders.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
        Self { named, folders }
    }

    /// Loads the first NVRTC that can be loaded.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] with what was tried; why the named one, or the only one found, cannot be loaded.
    pub fn open(&self) -> Result<Nvrtc> {
        if let Some(named) = &self.named {
            return Nvrtc::open(named);
        }
        let mut unusable = None;
        for name in NAMES {
            match Nvrtc::open(Path::new(name)) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(Error::Unopened { reason, .. }) if reason.contains("No such file") => {}
                Err(error) => unusable = unusable.or(Some(error)),
            }
        }
        for folder in &self.folders {
            for file in NAMES.iter().map(|name| folder.join(name)).filter(|file| file.is_file()) {
                match Nvrtc::open(&file) {
                    Ok(nvrtc) => return Ok(nvrtc),
                    Err(error) => unusable = unusable.or(Some(error)),
                }
            }
        }
        let names = NAMES.iter().map(ToString::to_string);
        let folders = self.folders.iter().map(|folder| folder.display().to_string());
        Err(unusable.unwrap_or_else(|| Error::NoCompiler { tried: names.chain(folders).collect() }))
    }
}

/// Entries of a folder whose names begin with `prefix`, the greatest first, numbers in names compared as numbers.
fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found: Vec<PathBuf> = entries.filter(|path| name(path).starts_with(prefix)).collect();
    found.sort_by_key(|path| {
        let name = name(path);
        let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse::<u64>().ok());
        (numbers.collect::<Vec<_>>(), name)
    });
    found.reverse();
    found
}

/// Compiles kernels for devices, with a cache on disk.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<PathBuf>,
    limit: u64,
}

/// A kernel's file, compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The machine code.
    pub bytes: Vec<u8>,
    /// What the compiler said; nothing when the cache had it.
    pub log: String,
    /// The cache had it.
    pub cached: bool,
}

impl Compiler {
    /// With this NVRTC, and a cache in the folder `cache` (created when something is written) or none.
    pub fn new(nvrtc: Nvrtc, cache: Option<PathBuf>) -> Self {
        Self { nvrtc, cache, limit: CACHE_BYTES }
    }

    /// Its NVRTC.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// The machine code of one source for `arch` (`sm_90a`): from the cache, else compiled and put there. A cache that
    /// cannot be written costs the next start its time, and nothing else.
    ///
    /// # Errors
    /// An architecture the compiler does not know; [`Error::Compile`] with the log.
    pub fn cubin(&self, source: &Source, arch: &str) -> Result<Cubin> {
        let entry =
            self.cache.as_ref().map(|folder| folder.join(format!("{}.cubin", self.key(source, arch))));
        if let Some(bytes) = entry.as_ref().and_then(|entry| read_entry(entry)) {
            return Ok(Cubin { bytes, log: String::new(), cached: true });
        }
        let Compiled { cubin, log, .. } = self.compile(source, arch, &[])?;
        if let Some(entry) = entry {
            write_entry(&entry, &cubin, self.limit).ok();
        }
        Ok(Cubin { bytes: cubin, log, cached: false })
    }

    /// Compiles without a look at the cache, with further options.
    ///
    /// # Errors
    /// As [`Compiler::cubin`].
    pub fn compile(&self, source: &Source, arch: &str, further: &[&str]) -> Result<Compiled> {
        if !self.nvrtc.knows(arch) {
            let (major, minor) = self.nvrtc.version();
            return Err(Error::Compile {
                kernel: source.name.into(),
                arch: arch.into(),
                what: format!("NVRTC {major}.{minor} does not know this GPU: install another version of it"),
            });
        }
        let options: Vec<String> = OPTIONS.iter().chain(further).map(ToString::to_string).collect();
        self.nvrtc.compile(source.name, source.text, &kernels::included(source.text), &options, arch)
    }

    /// Name of what this compiler makes of the source.
    fn key(&self, source: &Source, arch: &str) -> String {
        let (major, minor) = self.nvrtc.version();
        key(
            source.name,
            source.text,
            &kernels::included(source.text),
            OPTIONS,
            arch,
            &format!("nvrtc {major}.{minor}"),
        )
    }
}

/// SHA-256 of everything that decides what a compiler makes, each part with its length before it.
fn key(
    name: &str,
    source: &str,
    headers: &[(&str, &str)],
    options: &[&str],
    arch: &str,
    compiler: &str,
) -> String {
    let mut hash = Sha256::new();
    let mut part = |bytes: &str| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    [name, source, arch, compiler].into_iter().for_each(&mut part);
    part(&headers.len().to_string());
    headers.iter().flat_map(|(name, text)| [*name, *text]).for_each(&mut part);
    options.iter().copied().for_each(part);
    hex(&hash.finalize())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The content of an entry, if it is there and whole.
fn read_entry(entry: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(entry).ok()?;
    let (digest, cubin) = bytes.split_at_checked(32)?;
    if Sha256::digest(cubin)[..] != *digest || cubin.is_empty() {
        return None;
    }
    // When it was last of use, for `shrink`; on a file system that is read-only it stays as it is.
    File::options().append(true).open(entry).and_then(|file| file.set_modified(SystemTime::now())).ok();
    Some(cubin.to_vec())
}

/// Writes an entry under its name only when it is whole, then makes room.
fn write_entry(entry: &Path, cubin: &[u8], limit: u64) -> Result<()> {
    let folder = entry.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    let wrong = |e| Error::io("write", entry, e);
    let mut file = tempfile::Builder::new().prefix(".cubin").tempfile_in(folder).map_err(wrong)?;
    file.write_all(&Sha256::digest(cubin)).and_then(|()| file.write_all(cubin)).map_err(wrong)?;
    file.persist(entry).map_err(|e| wrong(e.error))?;
    shrink(folder, limit)
}

/// Removes the entries whose use is longest ago until the rest fits, and what writers that were killed left behind.
fn shrink(folder: &Path, limit: u64) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|e| Error::io("list", folder, e))?;
    let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let data = entry.metadata().ok()?;
            Some((data.modified().ok()?, data.len(), entry.path()))
        })
        .collect();
    let is_entry = |path: &Path| path.extension().is_some_and(|extension| extension == "cubin");
    let old = SystemTime::now() - std::time::Duration::from_secs(3600);
    for (_, _, path) in files.iter().filter(|(modified, _, path)| !is_entry(path) && *modified < old) {
        fs::remove_file(path).ok();
    }
    files.retain(|(_, _, path)| is_entry(path));
    files.sort();
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    for (_, bytes, path) in files {
        if total <= limit {
            break;
        }
        fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
        total -= bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two parts that only together are the same differ, and every part counts.
    #[test]
    fn a_key_changes_with_everything_that_decides_the_code() {
        let headers = [("a.cuh", "x")];
        let base = || key("k", "source", &headers, &["-O"], "sm_80", "nvrtc 13.0");
        let others = [
            key("j", "source", &headers, &["-O"], "sm_80", "nvrtc 13.0"),
            key("k", "sourc", &headers, &["-O"], "sm_80", "nvrtc 13.0"),
            key("k", "source", &[("a.cuh", "y")], &["-O"], "sm_80", "nvrtc 13.0"),
            key("k", "source", &[("b.cuh", "x")], &["-O"], "sm_80", "nvrtc 13.0"),
            key("k", "source", &[], &["-O"], "sm_80", "nvrtc 13.0"),
            key("k", "source", &headers, &["-O", "-g"], "sm_80", "nvrtc 13.0"),
            key("k", "source", &headers, &["-O"], "sm_90a", "nvrtc 13.0"),
            key("k", "source", &headers, &["-O"], "sm_80", "nvrtc 13.1"),
            key("ks", "ource", &headers, &["-O"], "sm_80", "nvrtc 13.0"),
        ];
        assert_eq!(base(), base());
        assert_eq!(base().len(), 64);
        assert!(others.iter().all(|other| *other != base()));
    }

    #[test]
    fn a_damaged_entry_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = folder.path().join("new/entry.cubin");
        write_entry(&entry, b"machine code", 1 << 20).expect("writes, with its folder");
        assert_eq!(read_entry(&entry).as_deref(), Some(&b"machine code"[..]));
        let whole = fs::read(&entry).expect("it is there");
        for damaged in [&whole[..whole.len() - 1], &whole[..10], &[], &[&whole[..], b"x"].concat()] {
            fs::write(&entry, damaged).expect("writes");
            assert_eq!(read_entry(&entry), None, "{} bytes", damaged.len());
        }
        let mut flipped = whole;
        flipped[40] ^= 1;
        fs::write(&entry, &flipped).expect("writes");
        assert_eq!(read_entry(&entry), None);
        write_entry(&entry, b"machine code", 1 << 20).expect("replaces it");
        assert!(read_entry(&entry).is_some());
    }

    #[test]
    fn the_cache_keeps_what_was_used_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = |n: u64| folder.path().join(format!("{n}.cubin"));
        let past = |n: u64| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(n);
        let age = |path: PathBuf, n| File::options().append(true).open(path)?.set_modified(past(n));
        for n in 1..=3 {
            write_entry(&entry(n), &[0; 68], 1000).expect("writes");
            age(entry(n), n).expect("sets its time");
        }
        let left_behind = folder.path().join(".cubin-killed");
        fs::write(&left_behind, b"half").and_then(|()| age(left_behind.clone(), 9)).expect("writes");
        // Used: now the youngest.
        assert!(read_entry(&entry(1)).is_some());
        write_entry(&entry(4), &[0; 68], 300).expect("writes");
        let left: Vec<bool> = (1..=4).map(|n| entry(n).exists()).collect();
        assert_eq!(left, [true, false, true, true]);
        assert!(!left_behind.exists());
    }

    #[test]
    fn places_are_tried_newest_first_and_once() {
        let root = tempfile::tempdir().expect("a folder");
        let make = |path: &str| fs::create_dir_all(root.path().join(path)).expect("makes a folder");
        make("toolkit/lib64");
        make("toolkit/targets/x86_64-linux/lib");
        for python in ["python3.9", "python3.12"] {
            make(&format!("venv/lib/{python}/site-packages/nvidia/cu13/lib"));
        }
        make("venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib");
        let vars = |name: &str| match name {
            "CUDA_HOME" | "CUDA_PATH" => Some(root.path().join("toolkit").into_os_string()),
            "VIRTUAL_ENV" => Some(root.path().join("venv").into_os_string()),
            _ => None,
        };
        let search = Search::from_vars(vars);
        let inside = search.folders.iter().filter_map(|folder| folder.strip_prefix(root.path()).ok());
        let found: Vec<String> = inside.map(|folder| folder.display().to_string()).collect();
        assert_eq!(
            found,
            [
                "toolkit/lib64",
                "toolkit/targets/x86_64-linux/lib",
                "venv/lib/python3.12/site-packages/nvidia/cu13/lib",
                "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib",
                "venv/lib/python3.9/site-packages/nvidia/cu13/lib",
            ]
        );
        let named = Search::from_vars(|name| (name == NVRTC_VARIABLE).then(|| "/none/libnvrtc.so".into()));
        let said = named.open().expect_err("there is none").to_string();
        assert!(said.starts_with("/none/libnvrtc.so cannot be loaded: "), "{said}");
    }
}
