//! NVRTC, the compiler as a library.

use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use super::sys::{CompilerFunctions, Handle, Status};
use crate::{Error, Result};

/// A loaded NVRTC.
pub struct Nvrtc {
    /// Never unloaded: programs of other threads may still be in it, and it is loaded for as long as models are.
    f: &'static CompilerFunctions,
    library: PathBuf,
    version: (u32, u32),
    /// Architectures it compiles for, without features of single ones: 80, 90, 100.
    archs: Vec<u32>,
}

/// What came of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// Its intermediate form, as text.
    pub ptx: String,
    /// What the compiler said: warnings, and with `--ptxas-options=-v` registers and spills.
    pub log: String,
}

/// A program that is destroyed however it is left.
struct Source<'a> {
    f: &'a CompilerFunctions,
    handle: Handle,
}

impl Drop for Source<'_> {
    fn drop(&mut self) {
        // SAFETY: created by us.
        unsafe { (self.f.destroy)(&mut self.handle) };
    }
}

impl Nvrtc {
    /// Loads it from a path, or by name from the loader's path.
    ///
    /// # Errors
    /// The loader's reason, or a function that is missing.
    pub fn open(library: &Path) -> Result<Self> {
        let f: &'static CompilerFunctions = Box::leak(Box::new(CompilerFunctions::open(library)?));
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: pointers to our own integers.
        unsafe {
            said((f.version)(&mut major, &mut minor), library, "nvrtcVersion")?;
            said((f.arch_count)(&mut count), library, "nvrtcGetNumSupportedArchs")?;
        }
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: room for as many as it said there are.
        said(unsafe { (f.archs)(archs.as_mut_ptr()) }, library, "nvrtcGetSupportedArchs")?;
        let archs = archs.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect();
        Ok(Self { f, library: library.into(), version: (major as u32, minor as u32), archs })
    }

    /// Where it was found.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// (major, minor)
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Whether it compiles for `arch`, such as `sm_90a`.
    pub fn knows(&self, arch: &str) -> bool {
        let number = arch.trim_start_matches("sm_").trim_end_matches(|c: char| c.is_ascii_lowercase());
        number.parse().is_ok_and(|number: u32| self.archs.contains(&number))
    }

    /// Compiles one source with headers that are handed over by name.
    ///
    /// # Errors
    /// [`Error::Compile`] with the log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
        arch: &str,
    ) -> Result<Compiled> {
        let wrong = |what: String| Error::Compile { kernel: name.into(), arch: arch.into(), what };
        let text =
            |text: &str| CString::new(text).map_err(|_| wrong("a NUL in its source or options".into()));
        let (file, source) = (text(&format!("{name}.cu"))?, text(source)?);
        let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts = headers.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>>>()?;
        let mut all = options.to_vec();
        all.push(format!("--gpu-architecture={arch}"));
        let options = all.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names, texts, options_c) = (pointers(&names), pointers(&texts), pointers(&options));
        let f = &self.f;
        let mut program = Source { f, handle: null_mut() };
        let count = headers.len() as c_int;
        // SAFETY: texts end with NUL and live until the end of this function; as many headers as names.
        let status = unsafe {
            let (texts, names) = (texts.as_ptr(), names.as_ptr());
            (f.create)(&mut program.handle, source.as_ptr(), file.as_ptr(), count, texts, names)
        };
        if status != 0 {
            return Err(wrong(format!("nvrtcCreateProgram: status {status}")));
        }
        // SAFETY: the program was created above; options end with NUL.
        let status = unsafe { (f.compile)(program.handle, options.len() as c_int, options_c.as_ptr()) };
        let log = self.text(&program, f.log_bytes, f.log).unwrap_or_default();
        if status != 0 {
            return Err(wrong(format!("nvrtcCompileProgram: status {status}\n{}", log.trim())));
        }
        let cubin = self.bytes(&program, f.cubin_bytes, f.cubin).map_err(&wrong)?;
        let ptx = self.text(&program, f.ptx_bytes, f.ptx).map_err(wrong)?;
        Ok(Compiled { cubin, ptx, log })
    }

    fn bytes(
        &self,
        program: &Source<'_>,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ) -> std::result::Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: a compiled program; the pointer is to our own variable.
        let status = unsafe { size(program.handle, &mut bytes) };
        let mut out = vec![0u8; bytes];
        // SAFETY: room for as much as it said there is.
        match status != 0 || unsafe { get(program.handle, out.as_mut_ptr().cast()) } != 0 {
            true => Err("it gives no result up".into()),
            false => Ok(out),
        }
    }

    fn text(
        &self,
        program: &Source<'_>,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ) -> std::result::Result<String, String> {
        let bytes = self.bytes(program, size, get)?;
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}.{} ({})", self.version.0, self.version.1, self.library.display())
    }
}

fn said(status: Status, library: &Path, call: &str) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => {
            Err(Error::Unopened { library: library.into(), reason: format!("{call} gives status {status}") })
        }
    }
}
