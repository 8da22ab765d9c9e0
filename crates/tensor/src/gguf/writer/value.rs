//! Metadata values as a writer takes them.

use super::super::ValueType;

pub(super) fn put_string(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

/// What can be written as a metadata value: numbers, bool, text, and slices of them.
pub trait ToValue {
    /// The type in the file, known without a value so that empty arrays have one.
    const KIND: ValueType;

    /// The type in the file.
    fn kind(&self) -> ValueType {
        Self::KIND
    }

    /// Appends the value's bytes.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! scalars {
    ($($type:ty as $kind:ident;)*) => {$(
        impl ToValue for $type {
            const KIND: ValueType = ValueType::$kind;

            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}

scalars! {
    u8 as U8;
    i8 as I8;
    u16 as U16;
    i16 as I16;
    u32 as U32;
    i32 as I32;
    u64 as U64;
    i64 as I64;
    f32 as F32;
    f64 as F64;
}

impl ToValue for bool {
    const KIND: ValueType = ValueType::Bool;

    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl ToValue for str {
    const KIND: ValueType = ValueType::String;

    fn put(&self, out: &mut Vec<u8>) {
        put_string(self.as_bytes(), out);
    }
}

impl ToValue for String {
    const KIND: ValueType = ValueType::String;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_str().put(out);
    }
}

impl<T: ToValue> ToValue for [T] {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend((T::KIND as u32).to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        for value in self {
            value.put(out);
        }
    }
}

impl<T: ToValue> ToValue for Vec<T> {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

impl<T: ToValue, const N: usize> ToValue for [T; N] {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

/// So that `&["a", "b"]` is an array of strings.
impl<T: ToValue + ?Sized> ToValue for &T {
    const KIND: ValueType = T::KIND;

    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
}
